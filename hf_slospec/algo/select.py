"""Which candidate nodes are verified: AdaServe's algorithms 1 and 2 and its adaptive tree shape.

Budgets count nodes, roots included. Corrections to the printed algorithms are marked where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from hf_slospec.algo.tree import ROOT, Candidates, FloatArray, IntArray, TokenTree

SLOOrder = Literal["ascending", "descending"]
StepTime = Callable[[IntArray], FloatArray]  # nodes verified in a step -> its predicted seconds


def required_tokens(elapsed_s: float, emitted: int, step_time_s: float, target_s: float | None) -> float:
    """A(r): tokens this step must commit for the running average to meet the target (AdaServe, constraint 3).

    ``elapsed_s`` and ``emitted`` count from the first token on. At most 1 means that the root alone suffices.
    """
    return 0.0 if target_s is None else (elapsed_s + step_time_s) / target_s - emitted


def adaptive_shape(
    num_requests: int, verify_tokens: int, draft_tokens: int, max_depth: int, max_width: int, depth_offset: int = 0
) -> tuple[int, int]:
    """Depth and beam width for this many requests (AdaServe, equations 8 and 9 with D_min = 0 and c2 = 0).

    D_min = 0 lets speculation stop when the batch alone fills the verifier, which the paper's D_min >= 3 cannot.
    """
    depth = verify_tokens // (num_requests + depth_offset) - 1
    width = draft_tokens // num_requests
    return min(max(depth, 0), max_depth), min(max(width, 1), max_width)


def count_until(needed: float, path_probs: FloatArray, at_most: int) -> int:
    """How many of ``path_probs``, best first, until 1 + their sum reaches ``needed``; all allowed if it never does."""
    path_probs = path_probs[:at_most]
    return min(int(np.searchsorted(expected_tokens(path_probs), needed)), len(path_probs))


def expected_tokens(path_probs: FloatArray) -> FloatArray:
    """Expected tokens of a root after taking none, one, two, ... of the nodes.  -> [len(path_probs) + 1]"""
    return np.cumsum(np.concatenate(([1.0], path_probs)))


def select_nodes(
    trees: Sequence[TokenTree],
    required: Sequence[float],
    budget: int,
    *,
    max_slo_nodes: int,
    order: SLOOrder = "ascending",
    step_time_s: StepTime | None = None,
) -> list[IntArray]:
    """AdaServe's Algorithm 2: first the nodes that targets need, then the globally best ones.

    Args:
        trees: one candidate tree per request.
        required: A(r) per request, see :func:`required_tokens`.
        budget: nodes verified at most, roots included; roots are always verified.
        max_slo_nodes: n_max, nodes the SLO phase may add to one request.
        order: who is served first in the SLO phase. Ascending A(r) meets more targets when the budget is short.
        step_time_s: when given, the throughput phase stops where expected tokens per second is highest
            instead of spending the whole budget.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    candidates = Candidates.of(trees)
    left = max(budget - len(trees), 0)
    is_taken = np.zeros(len(candidates.nodes), dtype=np.bool_)

    for request in sorted(range(len(trees)), key=lambda i: required[i], reverse=order == "descending"):
        own = np.flatnonzero(candidates.requests == request)
        # [FIX] the cap: no tree can commit more than depth + 1 tokens; sums path probabilities, not conditionals
        needed = min(required[request], trees[request].max_depth + 1)
        count = count_until(needed, candidates.path_probs[own], min(max_slo_nodes, left))
        is_taken[own[:count]] = True
        left -= count

    rest = np.flatnonzero(~is_taken)[:left]
    if step_time_s is not None:
        rest = rest[: _best_extension(candidates.path_probs, is_taken, rest, len(trees), step_time_s)]
    is_taken[rest] = True
    return _nodes_by_request(candidates, is_taken, len(trees))


def _best_extension(
    path_probs: FloatArray, is_taken: np.ndarray, rest: IntArray, num_roots: int, step_time_s: StepTime
) -> int:
    """How many of ``rest``, best first, maximise expected tokens per second of the whole step."""
    base = num_roots + path_probs[is_taken].sum()
    expected = base + np.concatenate(([0.0], np.cumsum(path_probs[rest])))
    num_nodes = num_roots + int(is_taken.sum()) + np.arange(len(expected))
    return int(np.argmax(expected / step_time_s(num_nodes)))


def optimal_nodes(trees: Sequence[TokenTree], required: Sequence[float], budget: int) -> list[IntArray] | None:
    """AdaServe's Algorithm 1 over finite trees: most expected tokens with every A(r) met; None if that is impossible.

    [FIX] roots are charged to the budget, exhausted trees are infeasible, and the last node may not overspend.
    """
    candidates = Candidates.of(trees)
    left = budget - len(trees)
    is_taken = np.zeros(len(candidates.nodes), dtype=np.bool_)
    for request, needed in enumerate(required):
        own = np.flatnonzero(candidates.requests == request)
        count = count_until(needed, candidates.path_probs[own], len(own))
        is_taken[own[:count]] = True
        left -= count
        if left < 0 or expected_tokens(candidates.path_probs[own[:count]])[-1] < needed:
            return None
    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return _nodes_by_request(candidates, is_taken, len(trees))


def _nodes_by_request(candidates: Candidates, is_taken: np.ndarray, num_requests: int) -> list[IntArray]:
    requests, nodes = candidates.requests[is_taken], candidates.nodes[is_taken]
    return [np.concatenate(([ROOT], nodes[requests == request])) for request in range(num_requests)]
