"""Token trees: the candidate tree a draft proposes and the draft tree that is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_slospec.forks import cached_property

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ROOT = 0


@dataclass(frozen=True)
class TokenTree:
    """Token tree of one request. Node 0 is the root, the last committed token; parents precede
    their children.

    ``path_probs[v]`` is f(v): f(root) = 1, f(v) = f(parent) * c(v) with the conditional c(v) in [0,
    1], so f never rises along a path. If f is the true probability that the verifier commits a
    path, the expected number of committed tokens of a step is ``path_probs.sum()`` (AdaServe,
    theorem 3.1)."""

    tokens: IntArray  # [num_nodes] int64
    parents: IntArray  # [num_nodes] int64, -1 at the root
    depths: IntArray  # [num_nodes] int64, 0 at the root
    path_probs: FloatArray  # [num_nodes] f64

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """Return a tree of the root alone, which is plain decoding."""
        return cls(np.array([token]), np.array([-1]), np.array([0]), np.array([1.0]))

    @classmethod
    def chain(cls, root_token: int, tokens: Sequence[int], conditional: float) -> TokenTree:
        """Return a tree of one path: ``tokens`` after the root, each with conditional probability
        ``conditional``.
        """
        depths = np.arange(len(tokens) + 1)
        return cls(
            np.array([root_token, *tokens]),
            depths - 1,
            depths,
            np.asarray(conditional**depths, np.float64),
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 if there is only a root."""
        return int(self.depths.max()) if len(self.depths) > 1 else 0

    @cached_property
    def _child_by_token(self) -> dict[tuple[int, int], int]:
        # Reversed, so that of two children with the same token the earlier, more probable one
        # stays.
        nodes = range(self.num_nodes - 1, ROOT, -1)
        return {(int(self.parents[v]), int(self.tokens[v])): v for v in nodes}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of ``node`` that carries ``token``; None if there is none."""
        return self._child_by_token.get((node, token)) if self.num_nodes > 1 else None

    def subtree(self, nodes: IntArray) -> TokenTree:
        """Return the tree of ``nodes`` (root included, parent-closed), in ascending order of node."""
        nodes = np.sort(nodes)
        parents = np.searchsorted(nodes, self.parents[nodes])
        parents[0] = -1
        return TokenTree(self.tokens[nodes], parents, self.depths[nodes], self.path_probs[nodes])

    def up_to(self, depth: int) -> TokenTree:
        """Return the tree without its nodes deeper than ``depth``."""
        return (
            self if self.max_depth <= depth else self.subtree(np.flatnonzero(self.depths <= depth))
        )

    def ancestor_mask(self) -> BoolArray:
        """Return the attention mask, [num_nodes, num_nodes] bool: [i, j] is True if j is i or an
        ancestor of i.
        """
        mask = np.eye(self.num_nodes, dtype=np.bool_)
        # Parents first, so a parent's mask is complete when it is copied.
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parents[node]]
        return mask

    def fault(self) -> str | None:
        """Return why this is not a valid tree; None if it is one.

        A valid tree has parents before children and path probabilities that never rise along a
        path."""
        if len({len(self.tokens), len(self.parents), len(self.depths), len(self.path_probs)}) > 1:
            return "tokens, parents, depths and path_probs differ in length"
        if (
            not self.num_nodes
            or self.parents[0] != -1
            or self.depths[0] != 0
            or self.path_probs[0] != 1.0
        ):
            return "node 0 is not a root with parent -1, depth 0 and path probability 1"
        inner = slice(1, None)
        parents = self.parents[1:]
        if not ((parents >= 0) & (parents < np.arange(1, self.num_nodes))).all():
            return "a child precedes its parent"
        if not (self.depths[inner] == self.depths[parents] + 1).all():
            return "a child's depth is not its parent's depth + 1"
        if (
            not (self.path_probs[inner] <= self.path_probs[parents]).all()
            or not (self.path_probs >= 0).all()
        ):
            return "path probabilities rise along a path, or are negative"
        return None

    def check(self) -> None:
        """Raise AssertionError if the tree has a fault."""
        fault = self.fault()
        assert fault is None, fault


@dataclass(frozen=True)
class Forest:
    """Several trees, their nodes concatenated tree after tree."""

    trees: Sequence[TokenTree]
    tree_of: IntArray  # [num_nodes] int64, index of the node's tree
    parents: IntArray  # [num_nodes] int64, index in the forest; a root is its own parent
    depths: IntArray  # [num_nodes] int64
    path_probs: FloatArray  # [num_nodes] f64, of the trees

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Concatenate at least one tree."""
        if len(trees) == 1:
            tree = trees[0]
            parents = np.maximum(tree.parents, ROOT)
            return cls(
                trees, np.zeros(len(parents), np.int64), parents, tree.depths, tree.path_probs
            )
        sizes = [tree.num_nodes for tree in trees]
        tree_of = np.repeat(np.arange(len(trees)), sizes)
        parents = np.concatenate([tree.parents for tree in trees])
        starts = np.cumsum([0, *sizes[:-1]])
        parents = np.where(parents < 0, 0, parents) + starts[tree_of]
        depths, path_probs = (
            np.concatenate([getattr(t, name) for t in trees]) for name in ("depths", "path_probs")
        )
        return cls(trees, tree_of, parents, depths, path_probs)

    @cached_property
    def starts(self) -> IntArray:
        """Indices of the roots, [num_trees] int64."""
        return np.flatnonzero(self.depths == 0)

    def canonical(self, scores: FloatArray) -> IntArray:
        """Return the non-root nodes in canonical order: score descending, depth ascending, tree,
        node.

        If scores never rise along a path, every prefix of this order, of all trees or of one, is
        parent-closed, since a parent is less deep than its child. Nodes that no verifier can reach
        (score 0 or NaN) are left out.

        Args:
            scores: [num_nodes] f64.

        Returns:
            [num_reachable] int64, nodes of the forest.
        """
        reachable = np.flatnonzero((scores > 0.0) & (self.depths > 0))
        # Stable: ties stay in order of tree and node.
        order = np.lexsort((self.depths[reachable], -scores[reachable]))
        return reachable[order]

    def indices(self, nodes: Sequence[Sequence[int]]) -> IntArray:
        """Return the indices in the forest of nodes given per tree.  -> [num_given] int64"""
        pairs = zip(self.starts, nodes, strict=True)
        return np.concatenate(
            [start + np.asarray(tree_nodes, dtype=np.int64) for start, tree_nodes in pairs]
        )

    def nodes(self, indices: IntArray) -> list[IntArray]:
        """Return the roots and the nodes at ``indices`` by tree, as ascending node numbers of each
        tree.
        """
        is_chosen = self.depths == 0
        is_chosen[indices] = True
        chosen = np.flatnonzero(is_chosen)
        return _split(chosen - self.starts[self.tree_of[chosen]], self._sizes(chosen))

    def subtrees(self, is_taken: BoolArray) -> list[TokenTree]:
        """Return each tree's subtree of the taken nodes; path probabilities stay.

        Args:
            is_taken: [num_nodes] bool, roots included and parent-closed.
        """
        if is_taken.all():
            return list(self.trees)
        taken = np.flatnonzero(is_taken)
        sizes = self._sizes(taken)
        new_index = np.cumsum(is_taken) - 1  # among the taken nodes of all trees
        firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        parents = new_index[self.parents[taken]] - firsts
        parents[self.depths[taken] == 0] = -1
        tokens = np.concatenate([tree.tokens for tree in self.trees])[taken]
        columns = [
            _split(c, sizes) for c in (tokens, parents, self.depths[taken], self.path_probs[taken])
        ]
        return [TokenTree(*column) for column in zip(*columns, strict=True)]

    def _sizes(self, indices: IntArray) -> IntArray:
        """Return the number of nodes at ``indices`` by tree.  -> [num_trees] int64"""
        return np.bincount(self.tree_of[indices], minlength=len(self.trees))


def ranks_in_groups(order: IntArray, begins_group: BoolArray) -> IntArray:
    """Return the rank of every node in its group, counted from 0.  -> [num_nodes] int64

    Args:
        order: [num_nodes] int64, the nodes group after group.
        begins_group: [num_nodes] bool, True where a group begins in ``order``.
    """
    indices = np.arange(len(order))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = indices - np.maximum.accumulate(np.where(begins_group, indices, 0))
    return ranks


def ranks_by_key(keys: IntArray) -> IntArray:
    """Return for every element how many earlier elements have the same key.  -> [n] int64

    Args:
        keys: [n] int64, none negative.
    """
    order = np.argsort(keys, kind="stable")
    return ranks_in_groups(order, np.diff(keys[order], prepend=-1) != 0)


def _split(values: FloatArray | IntArray, sizes: IntArray) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
