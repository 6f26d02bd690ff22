"""Speculation lengths that meet TPOT SLOs (SLOs-Serve, arXiv 2504.08784, appendix D and Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.select import StepTime
from hf_slospec.algo.tree import IntArray


@dataclass(frozen=True)
class SpecLengths:
    """Chain lengths with which every tier meets its TPOT SLO on average."""

    lengths: IntArray  # [tiers] tokens verified per request; 1: plain decoding, 0: the tier is empty
    limit_s: float  # maximum seconds of the step; inf without any TPOT SLO
    rate: float  # prompt tokens per second that can be prefilled


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
    """Return the chain lengths, one per tier, that allow the highest prefill rate (SLOs-Serve, appendix D).

    A step holds chains of one length per tier, and fills up with prompt tokens. A chain of s tokens (1: plain
    decoding) commits Acc(s) = 1 + a + ... + a^(s-1) in expectation, so a step may last up to tpot_slo * Acc(s). The
    tier with the smallest such bound limits the step. Given that limit, the shortest chains are best for all others, so
    trying every tier and length as the limit finds the best lengths.

    Tiers that speculate, and requests without a TPOT SLO, take part in every step. A tier that decodes plainly takes
    part with the tokens that are due before the step's end, earliest deadline first (Algorithm 2): one per TPOT SLO,
    however short the steps are. All requests are due in the first step, which must hold them. [FIX] the printed
    condition of Algorithm 2 takes tokens that are due later, until the step is full.

    TPOT SLOs are met on average only where a tier speculates. [FIX] a step may be shorter than its limit: where
    ``max_tokens`` or the curve keeps it from filling the limit, waiting gains nothing.

    Args:
        step_s: seconds of a step without drafting, by its tokens.
        tpot_slos_s: [tiers] seconds per output token; inf: no TPOT SLO, one token per step.
        counts: [tiers] decoding requests.
        acceptance: a in [0, 1], the probability that a token of a chain is accepted after its parent.
        max_len: longest chain, at least 1.
        max_tokens: maximum tokens of a step.
        draft_level_s: seconds that each token of the longest chain after the first adds to a step.
        slacks_s: [tiers] seconds by which this step may be longer or, if negative, must be shorter. A request x seconds
            behind its SLO catches up with -x; the paper asks for faster service but gives no formula.

    Returns:
        None if the TPOT SLOs cannot be met even without prefill.
    """
    tokens = np.arange(1, max_tokens + 1)
    seconds = np.maximum.accumulate(step_s(tokens))
    is_used = np.array([count > 0 for count in counts], dtype=np.bool_)  # [tiers]
    num_decoding = np.asarray(counts, dtype=np.int64)[is_used]
    slos_s = np.asarray(tpot_slos_s, dtype=np.float64)[is_used]
    accepted = np.cumsum(np.power(float(acceptance), np.arange(max_len)))  # Acc(1), Acc(2), ...
    paces = slos_s[:, None] * accepted  # [tiers, max_len] seconds a step may last
    if slacks_s is not None:
        paces += np.asarray(slacks_s, dtype=np.float64)[is_used, None]
    limits = np.unique(paces[np.isfinite(slos_s)]) if np.isfinite(slos_s).any() else np.array([np.inf])
    lengths = 1 + np.count_nonzero(paces < limits[:, None, None], axis=2)  # [limits, tiers]
    longest = lengths.max(axis=1, initial=1)
    loads, draft_s = lengths @ num_decoding, (longest - 1) * draft_level_s
    last = np.searchsorted(seconds, limits - draft_s, side="right")  # tokens of the largest step within the limit
    tokens, seconds = tokens[: last.max()], seconds[: last.max()]
    is_step = (tokens >= np.maximum(loads, 1)[:, None]) & (tokens <= last[:, None])
    is_step &= (longest <= max_len)[:, None]  # Acc saturates at 1 / (1 - a)
    is_due = (lengths == 1) & np.isfinite(slos_s)  # [limits, tiers] takes part when it is due
    loads, due = (lengths * ~is_due) @ num_decoding, is_due @ (num_decoding / slos_s)  # tokens per step, and per second
    rates = (tokens - loads[:, None]) / (seconds + draft_s[:, None]) - due[:, None]
    rates = np.where(is_step, np.maximum(rates, 0.0), -np.inf)  # at least 0 but for rounding
    rates = rates.max(axis=1, initial=-np.inf)
    best = int(np.argmax(rates))
    if rates[best] == -np.inf:
        return None
    by_tier = np.zeros(len(counts), dtype=np.int64)
    by_tier[is_used] = lengths[best]
    return SpecLengths(by_tier, float(limits[best]), float(rates[best]))
