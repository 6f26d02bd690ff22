"""Algorithms of AdaServe (arXiv 2501.12162): required tokens, adaptive tree shape, and Algorithm 2.

Budgets count nodes, roots included. Corrections to the printed algorithms are marked [FIX].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from hf_slospec.algo.tree import FloatArray, Forest, IntArray, TokenTree

SLOOrder = Literal["ascending", "descending"]


def required_tokens(elapsed_s: float, emitted: int, step_time_s: float, pace_s: float | None) -> float:
    """Return A(r), the tokens that this step must commit to meet the TPOT SLO on average (AdaServe, constraint 3).

    ``elapsed_s`` and ``emitted`` count from the first token on. At most 1 means that the root alone suffices; 0
    without a TPOT SLO.
    """
    return 0.0 if pace_s is None else (elapsed_s + step_time_s) / pace_s - emitted


def adaptive_shape(
    num_requests: int,
    verify_tokens: int,
    draft_tokens: int,
    max_depth: int,
    max_width: int,
    depth_offset: int = 0,
    width_offset: int = 0,
    min_depth: int = 0,
) -> tuple[int, int]:
    """Return depth and beam width for this many requests (AdaServe, equations 8 and 9).

    [FIX] D_min = 0 lets speculation stop when the batch alone fills the verifier, which the paper's D_min >= 3 cannot.

    Args:
        num_requests: n, requests that decode in the step.
        verify_tokens: B1, nodes that the target verifies per step at most, roots included.
        draft_tokens: B2, tokens that the draft forwards per level at most.
        max_depth, max_width: D_max and W_max.
        depth_offset, width_offset: c1 and c2.
        min_depth: D_min.
    """
    depth = verify_tokens // (num_requests + depth_offset) - 1
    width = draft_tokens // num_requests + width_offset
    return min(max(depth, min_depth), max_depth), min(max(width, 1), max_width)


def count_until(needed: float, path_probs: FloatArray, at_most: int) -> int:
    """Return how many of ``path_probs`` are needed for 1 + their sum to reach ``needed``; all if they do not suffice.

    Args:
        needed: expected tokens, the root's bonus token included.
        path_probs: [n] f64, descending.
        at_most: maximum number of path probabilities to use.
    """
    path_probs = path_probs[:at_most]
    return min(int(np.searchsorted(expected_tokens(path_probs), needed)), len(path_probs))


def expected_tokens(path_probs: FloatArray) -> FloatArray:
    """Return the expected tokens of a root with the first 0, 1, 2, ... nodes.  -> [len(path_probs) + 1] f64"""
    return np.cumsum(np.concatenate(([1.0], path_probs)))


def select_nodes(
    trees: Sequence[TokenTree],
    required: Sequence[float],
    budget: int,
    *,
    max_slo_nodes: int,
    order: SLOOrder = "ascending",
) -> list[IntArray]:
    """Select the nodes that TPOT SLOs need first, then the globally best nodes (AdaServe, Algorithm 2).

    Args:
        trees: one candidate tree per request.
        required: A(r) per request, see :func:`required_tokens`.
        budget: maximum number of verified nodes, roots included; roots are always verified.
        max_slo_nodes: n_max, nodes that the SLO phase may add to one request.
        order: order of the requests in the SLO phase. Ascending A(r) meets more TPOT SLOs when the budget is short.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    tree_of, path_probs = forest.tree_of[ranked], forest.path_probs[ranked]
    left = max(budget - len(trees), 0)
    is_taken = np.zeros(len(ranked), dtype=np.bool_)

    for request in sorted(range(len(trees)), key=lambda i: required[i], reverse=order == "descending"):
        indices = np.flatnonzero(tree_of == request)
        # [FIX] the cap: no tree can commit more than depth + 1 tokens; sums path probabilities, not conditionals
        needed = min(required[request], trees[request].max_depth + 1)
        count = count_until(needed, path_probs[indices], min(max_slo_nodes, left))
        is_taken[indices[:count]] = True
        left -= count

    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return forest.nodes(ranked[is_taken])
