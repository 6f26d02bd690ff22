"""AdaServe's optimal construction (arXiv 2501.12162, Algorithm 1) on the draft's probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hf_slospec.policies.adaserve import AdaServePolicy, count_until, expected_tokens
from hf_slospec.policies.registry import PolicyOptions, max_useful_depth
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import Forest, IntArray, TokenTree


class OptimalPolicy(AdaServePolicy):
    """Policy that solves AdaServe's problem for the draft's probabilities, without its
    approximations.

    Algorithm 1 takes path probabilities as true. It gives every request the fewest nodes that yield
    the tokens it requires, and spends the rest of the budget on the best nodes of all. Candidate
    trees are the widest and deepest that the config allows: by Theorem 4.1, beams as wide as the
    budget hold the optimal trees. What this costs in drafting is not considered, so the policy
    shows what better selection can gain, not what should be run.

    If a request requires more expected tokens than its candidate tree has, the whole tree is
    selected. If the budget does not suffice for all requests (the paper's INVALID), AdaServe's
    Algorithm 2 selects the nodes, with the default settings of ``adaserve``."""

    name = "optimal"
    options = PolicyOptions
    is_wide: ClassVar[bool] = True  # False: candidate trees have AdaServe's depth and width

    def _shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        num_spare = self.budget - len(requests)
        if not self.is_wide or num_spare <= 0:
            return super()._shape(requests)
        max_depth = min(max_useful_depth(requests, self.config.max_depth), num_spare)
        return max_depth, min(self.config.max_width, num_spare)

    def _nodes(
        self,
        requests: Sequence[Request],
        candidates: Sequence[TokenTree],
        required: Sequence[float],
    ) -> list[IntArray]:
        # Summed in the order in which nodes are selected, so that both sums round alike.
        whole = [expected_tokens(np.sort(tree.path_probs[1:])[::-1])[-1] for tree in candidates]
        attainable = [min(pair) for pair in zip(required, whole, strict=True)]
        nodes = optimal_nodes(candidates, attainable, self.budget)
        return super()._nodes(requests, candidates, attainable) if nodes is None else nodes


def optimal_nodes(
    trees: Sequence[TokenTree], required: Sequence[float], budget: int
) -> list[IntArray] | None:
    """Return the nodes with the most expected tokens among those selections that give every request
    the tokens it requires; None if there is no such selection.

    This is AdaServe's Algorithm 1, which is optimal if path probabilities are true. [FIX] unlike as
    printed, roots count against the budget, a tree with too few nodes makes the problem infeasible,
    and the last node may not exceed the budget.

    Args:
        trees: one candidate tree per request.
        required: A(r), expected tokens that each request requires.
        budget: maximum number of verified nodes, roots included.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    tree_of = forest.tree_of[ranked]
    path_probs = forest.path_probs[ranked]
    left = budget - len(trees)
    is_taken = np.zeros(len(ranked), dtype=np.bool_)
    for request, needed in enumerate(required):
        indices = np.flatnonzero(tree_of == request)
        count = count_until(needed, path_probs[indices], len(indices))
        is_taken[indices[:count]] = True
        left -= count
        if left < 0 or expected_tokens(path_probs[indices[:count]])[-1] < needed:
            return None
    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return forest.nodes(ranked[is_taken])
