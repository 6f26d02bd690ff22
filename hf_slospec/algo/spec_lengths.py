"""How long to speculate so that targets hold, and who decodes when (SLOs-Serve, appendix D and its Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.select import StepTime
from hf_slospec.algo.tree import BoolArray, IntArray


@dataclass(frozen=True)
class SpecLengths:
    """A step in which every tier keeps its target on average."""

    lengths: IntArray  # [tiers] tokens verified per request; 1: plain decoding, 0 where a tier is empty
    limit_s: float  # the step may last so long; inf without any target
    rate: float  # prompt tokens per second beside it


def best_lengths(
    step_s: StepTime,
    tpot_slos_s: Sequence[float],
    counts: Sequence[int],
    acceptance: float,
    max_len: int,
    max_tokens: int,
    draft_level_s: float = 0.0,
    slacks_s: Sequence[float] | None = None,
) -> SpecLengths | None:
    """The lengths of chains, one per tier, that leave most prompt tokens per second (SLOs-Serve, appendix D).

    Every step holds one chain of each decoding request, of the same length within a tier, and fills up with prompt
    tokens. A chain of s tokens (1: plain decoding) commits Acc(s) = 1 + a + ... + a^(s-1) in expectation, so a step
    may last up to target * Acc(s). The tier where that is least limits the step. Given that limit, the shortest chains
    are best for all others, so trying every tier and length as the limit finds the best lengths.

    Targets are met on average only, and a tier that could sit out some steps is charged for all of them. [FIX] a step
    may be shorter than its limit: where ``max_tokens`` or the curve stops it from filling the limit, waiting gains
    nothing.

    Args:
        step_s: seconds of a step without drafting, by its tokens.
        tpot_slos_s: [tiers] seconds per output token; inf: no target, one token per step.
        counts: [tiers] decoding requests.
        acceptance: a in [0, 1], the probability that a token of a chain is accepted after its parent.
        max_len: longest chain, at least 1.
        max_tokens: tokens of a step at most.
        draft_level_s: seconds that each token of the longest chain after the first adds to a step.
        slacks_s: [tiers] seconds that this step may last longer, or if negative must be shorter. A request behind its
            target by x seconds catches up with -x; the text, which wants it served faster, gives no formula.

    Returns:
        None if the targets cannot be kept even without any prompt.
    """
    tokens = np.arange(1, max_tokens + 1)
    seconds = np.maximum.accumulate(step_s(tokens))
    is_there = np.array([count > 0 for count in counts], dtype=np.bool_)
    num_decoding = np.asarray(counts, dtype=np.int64)[is_there]
    targets = np.asarray(tpot_slos_s, dtype=np.float64)[is_there]
    accepted = np.cumsum(np.power(float(acceptance), np.arange(max_len)))  # Acc(1), Acc(2), ...
    paces = targets[:, None] * accepted  # [tiers, max_len] seconds a step may last
    if slacks_s is not None:
        paces += np.asarray(slacks_s, dtype=np.float64)[is_there, None]
    limits = np.unique(paces[np.isfinite(targets)]) if np.isfinite(targets).any() else np.array([np.inf])
    best = None
    for limit in limits.tolist():
        lengths = 1 + np.count_nonzero(paces < limit, axis=1)
        longest = int(lengths.max(initial=1))
        if longest > max_len:  # Acc saturates at 1 / (1 - a)
            continue
        load, draft_s = int(num_decoding @ lengths), (longest - 1) * draft_level_s
        fitting = slice(max(load, 1) - 1, int(np.searchsorted(seconds, limit - draft_s, side="right")))
        rate = float(((tokens[fitting] - load) / (seconds[fitting] + draft_s)).max(initial=-np.inf))
        if rate > (-np.inf if best is None else best.rate):
            by_tier = np.zeros(len(counts), dtype=np.int64)
            by_tier[is_there] = lengths
            best = SpecLengths(by_tier, limit, rate)
    return best


@dataclass(frozen=True)
class Batches:
    """Who decodes in each of some batches of equal length, and what room is left for prompts."""

    decoding: BoolArray  # [batches, requests]
    left: IntArray  # [batches] tokens


def decoding_batches(tpot_slos_s: Sequence[float], budget: int, num_batches: int) -> Batches | None:
    """Batches of plain decoding in which every request gets its next token in time (SLOs-Serve, Algorithm 2).

    A batch lasts as long as the least target, t0, and goes to those whose tokens are due. A request's j-th token,
    counted from 0, is due at j * target and must be there by (j + 1) * target.

    [FIX] Due is what falls before the end of a batch, due < (i + 1) * t0. The printed ``due >= i * t0`` gives the same
    requests tokens until the budget is gone, and ``due <= i * t0`` is late where a target is no multiple of t0.

    Args:
        tpot_slos_s: [requests] seconds per output token, finite.
        budget: tokens of a batch that lasts t0 (Time2BS(t0)).

    Returns:
        None if the budget of some batch ends before those that are due.
    """
    targets = np.asarray(tpot_slos_s, dtype=np.float64)
    batch_s = targets.min()
    decoding = np.zeros((num_batches, len(targets)), dtype=np.bool_)
    for batch in range(num_batches):
        # Nobody is due twice, since no target is below t0, and all who are due must be served: no order is needed.
        decoding[batch] = decoding[:batch].sum(axis=0) * targets < (batch + 1) * batch_s
    left = budget - decoding.sum(axis=1)
    return Batches(decoding, left) if (left >= 0).all() else None
