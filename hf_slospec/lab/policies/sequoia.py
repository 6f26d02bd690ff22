"""Sequoia (arXiv 2402.12374): the static tree that is optimal for the measured acceptance rates,
with the size that predicted step times favour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.acceptance import Conditionals, path_products, tried_and_hit
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.engine.latency_curves import Count, Seconds
from hf_slospec.forks import cached_property
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.registry import NamedPolicy, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree, ranks_by_key

# Nodes [m, 1], levels with the root [l] -> seconds [m, l]
TreeTime = Callable[[IntArray, IntArray], FloatArray]


@dataclass(frozen=True)
class StaticTree:
    """Tree shape, independent of tokens. Parents precede children."""

    parents: tuple[int, ...]  # -1 at the root
    # Rank among the siblings; 0: the draft's most probable child, and the root
    ranks: tuple[int, ...]

    @classmethod
    def of_expansion(cls, expansion: Sequence[int]) -> StaticTree:
        """Return the shape in which every node of depth d has ``expansion[d]`` children."""
        parents = [-1]
        ranks = [0]
        layer = range(1)
        for count in expansion:
            parents += [node for node in layer for _ in range(count)]
            ranks += [rank for _ in layer for rank in range(count)]
            layer = range(layer.stop, len(parents))
        return cls(tuple(parents), tuple(ranks))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> IntArray:
        """Depths of the nodes, [num_nodes] int64."""
        depths = np.zeros(self.num_nodes, dtype=np.int64)
        for node in range(1, self.num_nodes):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; the root has depth 0."""
        return int(self.depths.max())

    @property
    def max_width(self) -> int:
        """Number of nodes of the widest level."""
        return int(np.bincount(self.depths).max())

    def within(self, forest: Forest) -> BoolArray:
        """Return a mask of the nodes of candidate trees that this shape contains.  -> [num_nodes]
        bool

        Siblings are ranked by path probability, ties by node index. Nodes of the shape may have no
        candidate."""
        inner = np.flatnonzero(forest.depths > 0)
        inner = inner[np.argsort(-forest.path_probs[inner], kind="stable")]
        ranks = np.zeros(len(forest.depths), dtype=np.int64)
        ranks[inner] = ranks_by_key(forest.parents[inner])
        # Child of each node of the shape by rank; -1: none, as in the last row and column.
        children = np.full((self.num_nodes + 1, max(self.ranks) + 2), -1)
        children[list(self.parents[1:]), list(self.ranks[1:])] = range(1, self.num_nodes)
        matches = np.zeros(len(ranks), dtype=np.int64)  # node of the shape; -1: none
        for depth in range(1, int(forest.depths.max()) + 1):
            level = np.flatnonzero(forest.depths == depth)
            rank = np.minimum(ranks[level], children.shape[1] - 1)
            matches[level] = children[matches[forest.parents[level]], rank]
        is_taken: BoolArray = matches >= 0
        return is_taken


# SpecInfer's tree (arXiv 2305.09781): 18 nodes, three chains from depth 2 on.
SPECINFER = StaticTree.of_expansion((1, 1, 3, 1, 1, 1, 1))


class Sequoia:
    """Optimal trees of every size and number of levels, by dynamic programming (Sequoia, arXiv
    2402.12374).

    ``expected[m, l]`` is the number of expected tokens of the best tree with exactly m nodes on at
    most l levels, the root included in both; -inf if there is none.
    """

    def __init__(self, acceptance: FloatArray, max_nodes: int, max_levels: int):
        """Solve for all sizes.

        Args:
            acceptance: [max_children] f64, probability that the child of rank r is accepted given
                that its parent is.
            max_nodes, max_levels: bounds of the trees, root included.
        """
        self.acceptance = acceptance
        # [nodes, levels, children of the root]; no tree has 0 nodes or levels
        self._values = np.full((max_nodes + 1, max_levels + 1, len(acceptance) + 1), -np.inf)
        self._values[1, 1:, 0] = 1.0
        self.expected = np.full((max_nodes + 1, max_levels + 1), -np.inf)
        sizes = np.arange(max_nodes + 1)
        # [m, y] nodes of the last child's subtree: m - y
        self._rest = np.maximum(sizes[:, None] - sizes, 0)
        for levels in range(1, max_levels + 1):
            for count in range(1, len(acceptance) + 1):
                self._values[:, levels, count] = self._splits(levels, count).max(axis=1)
            self.expected[:, levels] = self._values[:, levels].max(axis=1)

    def _splits(self, levels: int, count: int) -> FloatArray:
        """Return the expected tokens of trees whose root has ``count`` children.

        Returns:
            [m, y] f64, by number of nodes and by number of nodes outside of the last child's
            subtree.
        """
        below = self.expected[:, levels - 1]
        gain = np.where(below > 0.0, self.acceptance[count - 1] * np.maximum(below, 0.0), -np.inf)
        splits: FloatArray = self._values[:, levels, count - 1] + gain[self._rest]
        return splits

    def best_size(self, seconds: TreeTime, max_levels: int) -> tuple[int, int]:
        """Return the numbers of nodes and levels, root included, of the tree with the most expected
        tokens per second.
        """
        sizes = np.arange(1, len(self.expected))
        levels = np.arange(1, max_levels + 1)
        rates = self.expected[1:, 1 : max_levels + 1] / seconds(sizes[:, None], levels)
        size, level = np.unravel_index(np.argmax(rates), rates.shape)
        return int(size) + 1, int(level) + 1

    def tree(self, num_nodes: int, num_levels: int) -> StaticTree:
        """Return the best tree of this size, which must exist."""
        parents = [-1]
        ranks = [0]
        sizes = [num_nodes]
        levels = [num_levels]
        # Both lists grow during the iteration
        for node, (size, level) in enumerate(zip(sizes, levels, strict=True)):
            for count in range(int(np.argmax(self._values[size, level])), 0, -1):
                # Nodes outside of the last child's subtree
                rest = int(np.argmax(self._splits(level, count)[size]))
                parents.append(node)
                ranks.append(count - 1)
                sizes.append(size - rest)
                levels.append(level - 1)
                size = rest
        return StaticTree(tuple(parents), tuple(ranks))


class StaticTreePolicy(NamedPolicy):
    """Policy that verifies SpecInfer's tree of 18 nodes on every step."""

    name = "static"
    shape = SPECINFER
    width = SPECINFER.max_width

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        return cls.shape.max_depth * cls.width

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        max_depth = min(self.shape.max_depth, self.config.max_depth)
        return Plan(max_useful_depth(requests, max_depth), self.width)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        return selection_of(trees_within(self.shape, requests, candidates))


def trees_within(
    shape: StaticTree, requests: Sequence[Request], candidates: Sequence[TokenTree]
) -> list[TokenTree]:
    """Return the subtrees of the candidates that lie in the shape and can still be committed."""
    forest = Forest.of(without_useless_nodes(requests, candidates))
    return forest.subtrees(shape.within(forest))


MAX_NODES = 64  # maximum nodes per tree, root included
RESOLVE = 32  # steps after which trees are solved for again, with the latest acceptance rates
# Initial acceptance rate of the first child, and of each further child given that its earlier
# siblings were rejected
PRIOR = (0.6, 0.45)
PRIOR_WEIGHT = 20.0  # weight of the prior per rank, in tried children
MEMORY = 400.0  # maximum total weight per rank, in tried children; beyond it, old steps fade


class AcceptanceByRank:
    """Acceptance rates of children by rank, given that their parent was accepted; old steps fade.

    A child counts as tried if its earlier siblings were rejected, so the sum of the rates never
    exceeds 1."""

    def __init__(self, max_rank: int):
        self._tried = np.full(max_rank, PRIOR_WEIGHT)
        self._hits = PRIOR_WEIGHT * np.array([PRIOR[min(rank, 1)] for rank in range(max_rank)])

    @property
    def rates(self) -> FloatArray:
        """Acceptance rates by rank, [max_rank] f64 in (0, 1)."""
        accepted = self._hits / self._tried
        rejected_before = np.cumprod(np.concatenate(([1.0], 1.0 - accepted[:-1])))
        rates: FloatArray = accepted * rejected_before
        return rates

    def observe(self, forest: Forest, accepted: IntArray) -> None:
        """Update the rates with the verified trees of a step.

        Args:
            forest: the trees.
            accepted: [num_accepted] int64, indices of the accepted nodes.
        """
        was_tried, was_hit = tried_and_hit(forest, accepted)
        ranks = Conditionals.of(forest).ranks
        max_rank = len(self._tried)
        hit_below = np.full(len(ranks), max_rank)  # rank of the accepted child
        hit_below[forest.parents[accepted]] = ranks[accepted]
        was_tried &= ranks <= hit_below[forest.parents]
        for counts, nodes in ((self._tried, was_tried), (self._hits, was_hit)):
            counts += np.bincount(ranks[nodes], minlength=max_rank)
        fade = np.minimum(1.0, MEMORY / self._tried)
        self._tried *= fade
        self._hits *= fade


class SequoiaPolicy(NamedPolicy):
    """Policy that verifies one tree shape for all requests, chosen for every batch, or none if that
    is faster.

    Acceptance by rank is measured while decoding, starting from ``PRIOR``, and the trees are solved
    for again every ``RESOLVE`` steps. Predicted step times are for the whole batch; the paper
    considers a single request."""

    name = "sequoia"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.acceptance = AcceptanceByRank(config.max_width)
        self._num_steps = 0
        self._solve()

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        max_width = self.config.max_width  # the width of a tree is known only when it is solved for

        def seconds(num_nodes: Count, num_levels: Count) -> Seconds:
            num_tokens = len(requests) * num_nodes + num_prefill_tokens
            return self.costs.shape_s(requests, num_levels - 1, max_width, num_tokens)

        size = self._table.best_size(seconds, max_useful_depth(requests, self.config.max_depth) + 1)
        if size not in self._solved:
            self._solved[size] = self._table.tree(*size)
        self._shape = self._solved[size]
        self._step_s = float(seconds(*size))
        return Plan(self._shape.max_depth, min(self._shape.max_width, max_width))

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        trees = trees_within(self._shape, requests, candidates)
        # Trees are smaller than the shape if candidates are missing or few tokens are left.
        self._forest = forest = Forest.of(trees)
        path_probs = path_products(forest, self._rates[Conditionals.of(forest).ranks])
        expected = np.bincount(forest.tree_of, path_probs).tolist()
        return Selection(trees, expected, self._step_s)

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        self.acceptance.observe(self._forest, self._forest.indices(accepted))
        self._num_steps += 1
        if self._num_steps % RESOLVE == 0:
            self._solve()

    def _solve(self) -> None:
        self._rates = self.acceptance.rates
        max_nodes = min(MAX_NODES, 1 + self.config.max_depth * self.config.max_width)
        self._table = Sequoia(self._rates, max_nodes, self.config.max_depth + 1)
        self._solved: dict[tuple[int, int], StaticTree] = {}  # by size: nodes and levels
