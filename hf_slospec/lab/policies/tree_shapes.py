"""Static tree shapes: SpecInfer's, and Sequoia's, which are optimal for given acceptance rates by child rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray, ranks_by_key
from hf_slospec.forks import cached_property

TreeTime = Callable[[IntArray, IntArray], FloatArray]  # nodes [m, 1], levels with the root [l] -> seconds [m, l]


@dataclass(frozen=True)
class StaticTree:
    """Tree shape, independent of tokens. Parents precede children."""

    parents: tuple[int, ...]  # -1 at the root
    ranks: tuple[int, ...]  # rank among the siblings; 0: the draft's most probable child, and the root

    @classmethod
    def of_expansion(cls, expansion: Sequence[int]) -> StaticTree:
        """Return the shape in which every node of depth d has ``expansion[d]`` children."""
        parents, ranks, layer = [-1], [0], range(1)
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
        """Number of nodes of the widest layer."""
        return int(np.bincount(self.depths).max())

    def within(self, forest: Forest) -> BoolArray:
        """Return a mask of the nodes of candidate trees that this shape contains.  -> [num_nodes] bool

        Siblings are ranked by path probability, equal ones by node. Nodes of the shape may have no candidate.
        """
        inner = np.flatnonzero(forest.depths > 0)
        inner = inner[np.argsort(-forest.path_probs[inner], kind="stable")]
        num_ranks = max(self.ranks) + 1
        ranks = ranks_by_key(forest.parents[inner])
        keys = np.where(ranks < num_ranks, forest.parents[inner] * num_ranks + ranks, -1)
        order = np.argsort(keys)
        keys, inner = keys[order], inner[order]
        matches = np.full((self.num_nodes, len(forest.trees)), -1)  # candidate for each node of the shape; -1: none
        matches[0] = forest.starts
        for depth in range(1, self.max_depth + 1 if len(inner) else 0):
            level = np.flatnonzero(self.depths == depth)
            above, rank = matches[np.array(self.parents)[level]], np.array(self.ranks)[level, None]
            wanted = np.where(above >= 0, above * num_ranks + rank, -2)
            indices = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            matches[level] = np.where(keys[indices] == wanted, inner[indices], -1)
        is_taken = np.zeros(len(forest.depths), dtype=np.bool_)
        is_taken[matches[matches >= 0]] = True
        return is_taken


# SpecInfer's tree (arXiv 2305.09781): 18 nodes, three chains from depth 2 on.
SPECINFER = StaticTree.of_expansion((1, 1, 3, 1, 1, 1, 1))


class Sequoia:
    """Optimal trees of every size and number of levels, by dynamic programming (Sequoia, arXiv 2402.12374).

    ``expected[m, l]`` is the number of expected tokens of the best tree with exactly m nodes on at most l levels, the
    root included in both; -inf if there is none.
    """

    def __init__(self, acceptance: FloatArray, max_nodes: int, max_levels: int):
        """Solve for all sizes.

        Args:
            acceptance: [max_children] f64, probability that the child of rank r is accepted given that its parent is.
            max_nodes, max_levels: bounds of the trees, root included.
        """
        self.acceptance = acceptance
        # [nodes, levels, children of the root]; no tree has 0 nodes or levels
        self._values = np.full((max_nodes + 1, max_levels + 1, len(acceptance) + 1), -np.inf)
        self._values[1, 1:, 0] = 1.0
        self.expected = np.full((max_nodes + 1, max_levels + 1), -np.inf)
        sizes = np.arange(max_nodes + 1)
        self._rest = np.maximum(sizes[:, None] - sizes, 0)  # [m, y] nodes of the last child's subtree: m - y
        for levels in range(1, max_levels + 1):
            for count in range(1, len(acceptance) + 1):
                self._values[:, levels, count] = self._splits(levels, count).max(axis=1)
            self.expected[:, levels] = self._values[:, levels].max(axis=1)

    def _splits(self, levels: int, count: int) -> FloatArray:
        """Return the expected tokens of trees whose root has ``count`` children.

        Returns:
            [m, y] f64, by number of nodes and by number of nodes outside of the last child's subtree.
        """
        below = self.expected[:, levels - 1]
        gain = np.where(below > 0.0, self.acceptance[count - 1] * np.maximum(below, 0.0), -np.inf)
        splits: FloatArray = self._values[:, levels, count - 1] + gain[self._rest]
        return splits

    def best_size(self, seconds: TreeTime, max_levels: int) -> tuple[int, int]:
        """Return the nodes and levels, root included, with most expected tokens per second."""
        sizes, levels = np.arange(1, len(self.expected)), np.arange(1, max_levels + 1)
        rates = self.expected[1:, 1 : max_levels + 1] / seconds(sizes[:, None], levels)
        size, level = np.unravel_index(np.argmax(rates), rates.shape)
        return int(size) + 1, int(level) + 1

    def tree(self, num_nodes: int, num_levels: int) -> StaticTree:
        """Return the best tree of this size, which must exist."""
        parents, ranks, sizes, levels = [-1], [0], [num_nodes], [num_levels]
        for node, (size, level) in enumerate(zip(sizes, levels, strict=True)):  # they grow during the iteration
            for count in range(int(np.argmax(self._values[size, level])), 0, -1):
                rest = int(np.argmax(self._splits(level, count)[size]))  # nodes outside of the last child's subtree
                parents.append(node)
                ranks.append(count - 1)
                sizes.append(size - rest)
                levels.append(level - 1)
                size = rest
        return StaticTree(tuple(parents), tuple(ranks))
