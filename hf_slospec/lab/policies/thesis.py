"""Delacourt's thesis: trees by growth and pruning (its Algorithm 1), and nodes by importance (its
Algorithm 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.registry import (
    NamedPolicy,
    PolicyOptions,
    max_useful_depth,
    roofline_tokens,
    without_useless_nodes,
)
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree, ranks_by_key

MAX_CHILDREN = 4  # maximum children of a node (k), as printed


def grown_nodes(
    trees: Sequence[TokenTree],
    budget: int,
    max_nodes: int,
    max_depth: int,
    max_width: int,
    max_children: int = MAX_CHILDREN,
) -> list[IntArray]:
    """Grow the trees level by level; new nodes replace the worst kept nodes (Algorithm 1).

    A replaced node is not added again, nor are its children. If the width is the limit, the result
    need not be optimal: a node may have been dropped from a level that would have been worth its
    place only with its children.

    Args:
        trees: one candidate tree per request; their levels stand for the draft's proposals.
        budget: N, maximum nodes of all trees; roots are always kept.
        max_nodes: S, maximum nodes of one tree.
        max_depth: D.
        max_width: W, nodes that a tree may consider per level.
        max_children: k, maximum children of a node.

    Returns:
        Per request the kept nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    path_probs = forest.path_probs
    is_kept = forest.depths == 0
    grown = np.empty(0, np.int64)  # best first
    for depth in range(1, max_depth + 1):
        layer = np.flatnonzero((forest.depths == depth) & is_kept[forest.parents])
        layer = layer[np.argsort(-path_probs[layer], kind="stable")]
        for key, limit in ((forest.parents, max_children), (forest.tree_of, max_width)):
            layer = layer[ranks_by_key(key[layer]) < limit]
        nodes = np.concatenate((grown, np.sort(layer)))
        best = _best(path_probs[nodes], forest.tree_of[nodes], budget - len(trees), max_nodes - 1)
        grown = nodes[best]
        is_kept[:] = forest.depths == 0
        is_kept[grown] = True
    return forest.nodes(grown)


def _best(path_probs: FloatArray, tree_of: IntArray, budget: int, max_nodes: int) -> IntArray:
    """Return the most probable nodes, at most ``budget`` in all and ``max_nodes`` of each tree;
    ties go to the first node.

    Every node that the printed loop removes is the worst of those that share the limit it exceeds,
    so the order of removals does not matter. [FIX] The printed strict comparisons exceed the limits
    at ties, and may remove a parent before its equally bad child; here ties replace nothing.
    """
    best = np.argsort(-path_probs, kind="stable")
    best = best[path_probs[best] > 0.0]
    limited: IntArray = best[ranks_by_key(tree_of[best]) < max_nodes][: max(budget, 0)]
    return limited


class StopRule:
    """Decision, after each drafted level, on which trees to draft another level (the stopping
    criterion of Algorithm 1).

    The kept nodes are the best ones, at most N in all and S of each tree, as :func:`grown_nodes`
    keeps them. A tree without a kept node in its last level is finished. Children of pruned nodes
    are never kept, as they are no better than these. The limit on children per node is not
    applied, so a tree may be drafted further for a node that :func:`grown_nodes` will drop."""

    def __init__(self, num_trees: int, budget: int, max_nodes: int):
        """Start with roots only; ``budget`` N and ``max_nodes`` S count roots."""
        self.num_nodes = budget - num_trees
        self.max_tree_nodes = max_nodes - 1
        self.is_growing: BoolArray = np.ones(num_trees, dtype=np.bool_)
        self.path_probs: FloatArray = np.empty(0)  # per kept node, descending
        self.tree_of: IntArray = np.empty(0, np.int64)  # per kept node: index of its tree

    def goes_on(self, path_probs: FloatArray, trees: IntArray) -> BoolArray:
        """Add a drafted level of some trees; return for each of them whether to draft its next
        level.

        Args:
            path_probs: [num_rows, beam] f64, of the new nodes.
            trees: [num_rows] int64, indices of the trees.

        Returns:
            [num_rows] bool.
        """
        is_new = np.arange(len(self.tree_of) + path_probs.size) >= len(self.tree_of)
        level = np.where(self.is_growing[trees, None], path_probs, 0.0)
        all_probs = np.concatenate((self.path_probs, level.ravel()))
        tree_of = np.concatenate((self.tree_of, np.repeat(trees, path_probs.shape[1])))
        best = _best(all_probs, tree_of, self.num_nodes, self.max_tree_nodes)
        self.path_probs = all_probs[best]
        self.tree_of = tree_of[best]
        self.is_growing[:] = False
        self.is_growing[self.tree_of[is_new[best]]] = True
        return self.is_growing[trees]


def important_nodes(
    trees: Sequence[TokenTree],
    required: Sequence[float],
    tpot_slos_s: Sequence[float | None],
    budget: int,
    *,
    slack_s: float = 0.0,
    max_slo_nodes: int | None = None,
) -> list[IntArray]:
    """Select one node at a time for the request with the highest importance score (Algorithm 2).

    The score of a request that expects fewer tokens than its TPOT SLO requires is 1 + the seconds
    it will be late; the score of any other is the path probability of its best remaining node.
    Scores of a request never rise while it gets nodes, so sorting nodes by score gives what the
    printed loop would choose.

    [FIX] A request without remaining nodes is skipped. Lateness takes the request's progress into
    account (``required`` as in AdaServe), not as if every step were its first. Without
    ``max_slo_nodes``, as printed, a request whose TPOT SLO no tree can meet takes the whole budget,
    its least probable nodes included.

    Args:
        trees: one candidate tree per request.
        required: tokens that each request must commit in this step, see
            :func:`~hf_slospec.policies.adaserve.required_tokens`.
        tpot_slos_s: seconds per output token; None: no TPOT SLO.
        budget: maximum number of verified nodes, roots included; roots are always verified.
        slack_s: epsilon, seconds by which to be ahead.
        max_slo_nodes: n_max of AdaServe's limits: a request requires at most its tree's depth + 1
            tokens, and gets at most this many nodes for being late. None: no limits.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    # Tree after tree, best nodes first
    ranked = ranked[np.argsort(forest.tree_of[ranked], kind="stable")]
    tree_of = forest.tree_of[ranked]
    path_probs = forest.path_probs[ranked]
    seconds = np.array([1.0 if tpot_slo_s is None else tpot_slo_s for tpot_slo_s in tpot_slos_s])
    has_slo = np.array([tpot_slo_s is not None for tpot_slo_s in tpot_slos_s])
    needed = np.where(has_slo, np.asarray(required) + slack_s / seconds, 0.0)
    ranks = ranks_by_key(tree_of)
    if max_slo_nodes is not None:
        needed = np.minimum(needed, [tree.max_depth + 1.0 for tree in trees])
    missing = needed[tree_of] - _expected_before(path_probs, ranks)
    is_late = missing > 0.0
    if max_slo_nodes is not None:
        is_late &= ranks < max_slo_nodes
    scores = np.where(is_late, 1.0 + missing * seconds[tree_of], path_probs)
    best = np.argsort(-scores, kind="stable")[: max(budget - len(trees), 0)]
    return forest.nodes(ranked[best])


def _expected_before(path_probs: FloatArray, ranks: IntArray) -> FloatArray:
    """Return the expected tokens of the root and the nodes before each node.  -> [num_nodes] f64

    Args:
        path_probs: [num_nodes] f64, tree after tree.
        ranks: [num_nodes] int64, ranks of the nodes in their trees.
    """
    sums = np.cumsum(path_probs) - path_probs
    firsts = np.arange(len(ranks)) - ranks
    expected: FloatArray = 1.0 + sums - sums[firsts]
    return expected


RECENT = 20  # steps whose mean is the predicted latency of the next one, as printed


class ThesisOptions(PolicyOptions):
    """Settings of ``thesis``."""

    max_tree_nodes: int | None = Field(
        None,
        ge=1,
        description="Maximum nodes of one request's tree, its root included (S). None: no limit.",
    )


class ThesisSLOOptions(PolicyOptions):
    """Settings of ``thesis-slo``."""

    slack: float = Field(
        0.0, ge=0, description="Seconds per step to be ahead of TPOT SLOs by (epsilon)."
    )


class CappedThesisSLOOptions(ThesisSLOOptions):
    """Settings of ``thesis-slo-capped``."""

    max_slo_share: float = Field(
        1.2,
        gt=0,
        description="n_max as a multiple of an even share of the budget: a late request's limit.",
    )


def whole_beam(requests: Sequence[Request], config: PolicySettings, budget: int) -> tuple[int, int]:
    """Return the maximum useful depth, or 0 if the roots alone fill the budget, and the config's
    maximum width.
    """
    if budget <= len(requests):
        return 0, 1
    return max_useful_depth(requests, config.max_depth), config.max_width


class ThesisPolicy(NamedPolicy):
    """Policy that maximises expected tokens under a node budget for all trees (N) and one per tree
    (S), by Algorithm 1.

    Another level of a tree is drafted as long as its last level holds one of the N best nodes so
    far, counting at most S nodes per tree; this loses nothing, as no child is better than its
    parent. Drafters that do not draft level by level draft the planned depth.
    """

    name = "thesis"
    options = ThesisOptions

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.budget = config.token_budget or roofline_tokens(costs)
        self.max_tree_nodes = config.options_of(ThesisOptions).max_tree_nodes or self.budget

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        rule = StopRule(len(requests), self.budget, self.max_tree_nodes)
        return Plan(*whole_beam(requests, self.config, self.budget), goes_on=rule.goes_on)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        config = self.config
        candidates = without_useless_nodes(requests, candidates)
        nodes = grown_nodes(
            candidates, self.budget, self.max_tree_nodes, config.max_depth, config.max_width
        )
        return selection_of(
            [tree.subtree(grown) for tree, grown in zip(candidates, nodes, strict=True)]
        )


class ThesisSLOPolicy(AdaServePolicy):
    """Policy that selects nodes for TPOT SLOs first, by lateness of the requests (Algorithm 2).

    One of n requests may get the whole budget N except for the roots of all other requests, so
    candidate trees must have S >= N - n + 1 nodes. Therefore N is limited to n + ``max_depth`` *
    ``max_width``.
    """

    name = "thesis-slo"
    options: ClassVar[type[PolicyOptions]] = ThesisSLOOptions

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.slack_s = config.options_of(ThesisSLOOptions).slack
        self._latencies: deque[float] = deque(maxlen=RECENT)

    def _shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        return whole_beam(requests, self.config, self.budget)

    def _step_s(self, requests: Sequence[Request], plan: Plan) -> float:
        return sum(self._latencies) / max(len(self._latencies), 1)

    def _nodes(
        self,
        requests: Sequence[Request],
        candidates: Sequence[TokenTree],
        required: Sequence[float],
    ) -> list[IntArray]:
        return important_nodes(
            candidates,
            required,
            [request.pace_s for request in requests],
            min(self.budget, len(requests) + self.max_nodes(self.config)),
            slack_s=self.slack_s,
            max_slo_nodes=self._max_slo_nodes(len(requests)),
        )

    def _max_slo_nodes(self, num_requests: int) -> int | None:
        return None

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        self._latencies.append(phases.total_s)


class CappedThesisSLOPolicy(ThesisSLOPolicy):
    """Policy ``thesis-slo`` with AdaServe's limits, so that a late request cannot take the whole
    budget.
    """

    name = "thesis-slo-capped"
    options = CappedThesisSLOOptions

    def _max_slo_nodes(self, num_requests: int) -> int | None:
        share = self.config.options_of(CappedThesisSLOOptions).max_slo_share
        return int(share * self.budget / num_requests)
