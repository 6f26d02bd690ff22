"""AdaServe's Algorithm 1, an oracle for the other algorithms: most expected tokens with every requirement met."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import Forest, IntArray, TokenTree
from hf_slospec.policies.adaserve_selection import count_until, expected_tokens


def optimal_nodes(trees: Sequence[TokenTree], required: Sequence[float], budget: int) -> list[IntArray] | None:
    """Return the nodes with most expected tokens such that every A(r) is met; None if that is impossible.

    [FIX] roots are charged to the budget, exhausted trees are infeasible, and the last node may not overspend.

    Args:
        trees: one candidate tree per request.
        required: A(r) per request.
        budget: maximum number of verified nodes, roots included.
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
