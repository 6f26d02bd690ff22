"""Which candidate nodes are verified: AdaServe's algorithms 1 and 2 and its adaptive tree shape.

Budgets count nodes, roots included. Corrections to the printed algorithms are marked where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree

SLOOrder = Literal["ascending", "descending"]
StepTime = Callable[[IntArray], FloatArray]  # nodes verified in a step -> its predicted seconds


def required_tokens(elapsed_s: float, emitted: int, step_time_s: float, tpot_slo_s: float | None) -> float:
    """A(r): tokens this step must commit for the running average to meet the target (AdaServe, constraint 3).

    ``elapsed_s`` and ``emitted`` count from the first token on. At most 1 means that the root alone suffices.
    """
    return 0.0 if tpot_slo_s is None else (elapsed_s + step_time_s) / tpot_slo_s - emitted


def adaptive_shape(
    num_requests: int, verify_tokens: int, draft_tokens: int, max_depth: int, max_width: int, depth_offset: int = 0
) -> tuple[int, int]:
    """Depth and beam width for this many requests (AdaServe, equations 8 and 9 with D_min = 0 and c2 = 0).

    D_min = 0 lets speculation stop when the batch alone fills the verifier, which the paper's D_min >= 3 cannot.

    Args:
        num_requests: n, those that decode in the step.
        verify_tokens: B1, nodes the target verifies per step at most, roots included.
        draft_tokens: B2, tokens the draft forwards per level at most.
        max_depth, max_width: D_max and W_max.
        depth_offset: c1.
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
) -> list[IntArray]:
    """AdaServe's Algorithm 2: first the nodes that targets need, then the globally best ones.

    Args:
        trees: one candidate tree per request.
        required: A(r) per request, see :func:`required_tokens`.
        budget: nodes verified at most, roots included; roots are always verified.
        max_slo_nodes: n_max, nodes the SLO phase may add to one request.
        order: who is served first in the SLO phase. Ascending A(r) meets more targets when the budget is short.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    tree_of, path_probs = forest.tree_of[ranked], forest.path_probs[ranked]
    left = max(budget - len(trees), 0)
    is_taken = np.zeros(len(ranked), dtype=np.bool_)

    for request in sorted(range(len(trees)), key=lambda i: required[i], reverse=order == "descending"):
        own = np.flatnonzero(tree_of == request)
        # [FIX] the cap: no tree can commit more than depth + 1 tokens; sums path probabilities, not conditionals
        needed = min(required[request], trees[request].max_depth + 1)
        count = count_until(needed, path_probs[own], min(max_slo_nodes, left))
        is_taken[own[:count]] = True
        left -= count

    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return forest.nodes(ranked[is_taken])


def best_ratio_nodes(
    forest: Forest, values: FloatArray, budget: int, step_time_s: StepTime, mixed_time_s: StepTime | None = None
) -> BoolArray:
    """The nodes whose value per second of the step is highest (the goodput rule, with one weight per request).

    Sorted by value every prefix is a set of trees, and the value of a set is the sum of its nodes', so the best set of
    each size is a prefix; of these the one with the best ratio is taken. Where prompts are fed in the same step, their
    time is spent anyway: in the ratio it would make every node look cheap. There, nodes are taken as long as they yield
    as much per second as the best ratio without prompts.

    Args:
        values: [num_nodes] f64, weight of the request times path probability; a root counts its weight.
        budget: nodes verified at most, roots included; roots are always verified.
        step_time_s: the whole step's seconds, drafting included, by its number of nodes, were no prompts fed.
        mixed_time_s: the same with the prompts that are; None: there are none.

    Returns:
        [num_nodes] bool, roots included.
    """
    is_taken: BoolArray = forest.depths == 0
    num_roots = len(forest.trees)
    ranked = forest.canonical(values)[: max(budget - num_roots, 0)]
    total = np.cumsum(np.concatenate(([values[is_taken].sum()], values[ranked])))
    num_nodes = num_roots + np.arange(len(total))
    ratio = total / step_time_s(num_nodes)
    worth = ratio if mixed_time_s is None else total - ratio.max() * mixed_time_s(num_nodes)
    is_taken[ranked[: int(np.argmax(worth))]] = True
    return is_taken


def optimal_nodes(trees: Sequence[TokenTree], required: Sequence[float], budget: int) -> list[IntArray] | None:
    """AdaServe's Algorithm 1 over finite trees: most expected tokens with every A(r) met; None if that is impossible.

    [FIX] roots are charged to the budget, exhausted trees are infeasible, and the last node may not overspend.

    Args:
        trees: one candidate tree per request.
        required: A(r) per request, see :func:`required_tokens`.
        budget: nodes verified at most, roots included.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    tree_of, path_probs = forest.tree_of[ranked], forest.path_probs[ranked]
    left = budget - len(trees)
    is_taken = np.zeros(len(ranked), dtype=np.bool_)
    for request, needed in enumerate(required):
        own = np.flatnonzero(tree_of == request)
        count = count_until(needed, path_probs[own], len(own))
        is_taken[own[:count]] = True
        left -= count
        if left < 0 or expected_tokens(path_probs[own[:count]])[-1] < needed:
            return None
    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return forest.nodes(ranked[is_taken])
