"""Delacourt's thesis: trees grown and pruned for throughput (its Algorithm 1), nodes by importance (its Algorithm 2).

Budgets count nodes, roots included. Corrections to the printed algorithms are marked where they are made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree, places_by_key

MAX_CHILDREN = 4  # of a node (k), as printed


def grown_nodes(
    trees: Sequence[TokenTree],
    budget: int,
    max_nodes: int,
    max_depth: int,
    max_width: int,
    max_children: int = MAX_CHILDREN,
) -> list[IntArray]:
    """Algorithm 1: layer after layer, each request's best new nodes push out the worst that were kept so far.

    A node that was pushed out stays out, and so do its children. With a binding width the result need not be the best
    one: a narrow layer may have dropped a node that only its children would have paid for.

    Args:
        trees: one candidate tree per request; their layers stand for what the draft proposes.
        budget: N, nodes of all trees at most; roots are always kept.
        max_nodes: S, nodes of one tree at most.
        max_depth: D.
        max_width: W, nodes that a tree may consider per layer.

    Returns:
        Per request the kept nodes, root first; each set is parent-closed.
    """
    growth = _Growth(Forest.of(trees), budget, max_nodes)
    for depth in range(1, max_depth + 1):
        layers = _layers(growth.forest, depth, growth.is_kept, max_width, max_children)
        if not sum(growth.add_layer(tree, layer) for tree, layer in layers):
            break
    return growth.forest.nodes(np.flatnonzero(growth.is_kept))


def _layers(
    forest: Forest, depth: int, is_kept: BoolArray, max_width: int, max_children: int
) -> Iterator[tuple[int, list[int]]]:
    """The best children that kept nodes have at this depth, best first.  -> tree by tree, nodes of the forest"""
    nodes = np.flatnonzero((forest.depths == depth) & is_kept[forest.parents] & (forest.path_probs > 0.0))
    nodes = nodes[np.argsort(-forest.path_probs[nodes], kind="stable")]
    for key, limit in ((forest.parents, max_children), (forest.tree_of, max_width)):
        nodes = nodes[places_by_key(key[nodes]) < limit]
    nodes = nodes[np.argsort(forest.tree_of[nodes], kind="stable")]
    first = np.flatnonzero(np.diff(forest.tree_of[nodes], prepend=-1))
    for own in np.split(nodes, first[1:]) if len(nodes) else ():
        yield int(forest.tree_of[own[0]]), own.tolist()


class _Growth:
    """What is kept so far. The worst of a tree and of all are found in heaps, where pruned nodes stay until met."""

    def __init__(self, forest: Forest, budget: int, max_nodes: int):
        self.forest, self.budget, self.max_nodes = forest, budget, max_nodes
        self.is_kept: BoolArray = forest.depths == 0
        self.path_probs = forest.path_probs.tolist()
        self.sizes, self.total = [1] * len(forest.trees), len(forest.trees)
        self.own: list[list[tuple[float, int, int]]] = [[] for _ in forest.trees]  # (path probability, -depth, -node)
        self.everyone: list[tuple[float, int, int]] = []

    def add_layer(self, tree: int, nodes: Sequence[int]) -> int:
        """-> how many were added"""
        num_added = 0
        for node in nodes:
            is_whole, is_spent = self.sizes[tree] >= self.max_nodes, self.total >= self.budget
            # [FIX] a tie must not be added, else the limits are exceeded. So no child of a node that was pruned after
            # the layer was looked up can be: what is left is at least as good as that node, and that as its children.
            if is_spent and self.path_probs[node] <= self._worst(self.everyone):
                break
            if is_whole and self.path_probs[node] <= self._worst(self.own[tree]):
                break
            if is_whole or is_spent:
                self._prune_worst(self.own[tree] if is_whole else self.everyone)
            self._add(tree, node)
            num_added += 1
        return num_added

    def _worst(self, heap: list[tuple[float, int, int]]) -> float:
        """Path probability of the worst kept node; inf if only roots are kept, which nothing pushes out."""
        while heap and not self.is_kept[-heap[0][2]]:
            heapq.heappop(heap)
        return heap[0][0] if heap else np.inf

    def _prune_worst(self, heap: list[tuple[float, int, int]]) -> None:
        # [FIX] of equal ones the deepest goes: an inner node would leave its children without a parent
        node = -heapq.heappop(heap)[2]
        self.is_kept[node] = False
        self._count(int(self.forest.tree_of[node]), -1)

    def _add(self, tree: int, node: int) -> None:
        entry = (self.path_probs[node], -int(self.forest.depths[node]), -node)
        heapq.heappush(self.own[tree], entry)
        heapq.heappush(self.everyone, entry)
        self.is_kept[node] = True
        self._count(tree, 1)

    def _count(self, tree: int, change: int) -> None:
        self.sizes[tree] += change
        self.total += change


def important_nodes(
    trees: Sequence[TokenTree],
    required: Sequence[float],
    tpot_slos_s: Sequence[float | None],
    budget: int,
    *,
    slack_s: float = 0.0,
    capped: bool = False,
    max_slo_nodes: int = 0,
) -> list[IntArray]:
    """Algorithm 2: one node at a time to the request of the highest importance score.

    The score of a request that expects fewer tokens than its target requires is 1 + the seconds it will be late, of
    any other the path probability of its best node left. Scores of a request never rise while it is given nodes, so
    the nodes in order of their scores are what the printed loop would choose.

    [FIX] A request without nodes left is out of the race. Lateness counts from where the request stands (``required``
    as in AdaServe), not as if every step were its first. Uncapped, as printed, a request whose target no tree can meet
    takes the whole budget, its most useless nodes included.

    Args:
        trees: one candidate tree per request.
        required: tokens each request needs of this step, see :func:`~hf_slospec.algo.select.required_tokens`.
        tpot_slos_s: seconds per output token; None: no target.
        budget: nodes verified at most, roots included; roots are always verified.
        slack_s: epsilon, seconds to be ahead by.
        capped: apply AdaServe's limits: nobody needs more than its tree's depth + 1 tokens, nor gets more than
            ``max_slo_nodes`` for being late.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    ranked = ranked[np.argsort(forest.tree_of[ranked], kind="stable")]  # tree after tree, best nodes first
    tree_of, path_probs = forest.tree_of[ranked], forest.path_probs[ranked]
    seconds = np.array([1.0 if target is None else target for target in tpot_slos_s])
    has_target = np.array([target is not None for target in tpot_slos_s])
    needed = np.where(has_target, np.asarray(required) + slack_s / seconds, 0.0)
    places = places_by_key(tree_of)
    if capped:
        needed = np.minimum(needed, [tree.max_depth + 1.0 for tree in trees])
    missing = needed[tree_of] - _expected_before(path_probs, places)
    is_late = missing > 0.0
    if capped:
        is_late &= places < max_slo_nodes
    scores = np.where(is_late, 1.0 + missing * seconds[tree_of], path_probs)
    best = np.argsort(-scores, kind="stable")[: max(budget - len(trees), 0)]
    return forest.nodes(ranked[best])


def _expected_before(path_probs: FloatArray, places: IntArray) -> FloatArray:
    """Tokens expected of a root and of the nodes before each one, given tree after tree."""
    before = np.cumsum(path_probs) - path_probs
    firsts = np.arange(len(places)) - places
    expected: FloatArray = 1.0 + before - before[firsts]
    return expected
