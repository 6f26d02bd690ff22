"""``TokenTree``, the draft tree of one request, and ``Forest``, the draft trees of a step."""

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

ROOT = 0  # node index of the root


@dataclass(frozen=True)
class TokenTree:
    """Token tree of one request. Node 0 is the root, which is the last committed token; parents
    precede their children.

    Drafters propose candidate trees; the policy selects subtrees of them, the draft trees to
    verify.

    ``path_probs[v]`` is f(v), the predicted probability that the path to node v is accepted:
    f(root) = 1, and f(v) = f(parent) * c(v) with the conditional probability c(v) in [0, 1], so f
    does not increase along a path. If f is exact, a step commits ``path_probs.sum()`` tokens on
    average (AdaServe, theorem 3.1).
    """

    tokens: IntArray  # [num_nodes] int64
    parents: IntArray  # [num_nodes] int64, -1 at the root
    depths: IntArray  # [num_nodes] int64, 0 at the root
    path_probs: FloatArray  # [num_nodes] f64

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        """Return a tree with the root only, whose verification is plain decoding."""
        return cls(np.array([token]), np.array([-1]), np.array([0]), np.array([1.0]))

    @classmethod
    def chain(cls, root_token: int, tokens: Sequence[int], conditional: float) -> TokenTree:
        """Return a tree with a single path.

        Args:
            root_token: last committed token.
            tokens: tokens after the root.
            conditional: probability of each token given the tokens before it.
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
        """Depth of the deepest node; 0 if the root is the only node."""
        return int(self.depths.max()) if len(self.depths) > 1 else 0

    @cached_property
    def _child_by_token(self) -> dict[tuple[int, int], int]:
        # In reverse order, so that of two siblings with the same token the dict keeps the earlier
        # one, which is the more probable.
        nodes = range(self.num_nodes - 1, ROOT, -1)
        return {(int(self.parents[v]), int(self.tokens[v])): v for v in nodes}

    def child(self, node: int, token: int) -> int | None:
        """Return the child of ``node`` that carries ``token``; None if there is none."""
        return self._child_by_token.get((node, token)) if self.num_nodes > 1 else None

    def subtree(self, nodes: IntArray) -> TokenTree:
        """Return the tree that consists of ``nodes``, in ascending order.

        Args:
            nodes: node indices; they include the root and the parent of every node.
        """
        nodes = np.sort(nodes)
        parents = np.searchsorted(nodes, self.parents[nodes])
        parents[0] = -1
        return TokenTree(self.tokens[nodes], parents, self.depths[nodes], self.path_probs[nodes])

    def up_to(self, depth: int) -> TokenTree:
        """Return the tree without the nodes deeper than ``depth``."""
        return (
            self if self.max_depth <= depth else self.subtree(np.flatnonzero(self.depths <= depth))
        )

    def ancestor_mask(self) -> BoolArray:
        """Return the tree attention mask: entry [i, j] is True if node j is node i or an ancestor
        of it.

        Returns:
            [num_nodes, num_nodes] bool.
        """
        mask = np.eye(self.num_nodes, dtype=np.bool_)
        # Parents precede children, so a parent's row is complete when it is copied.
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parents[node]]
        return mask

    def fault(self) -> str | None:
        """Return a description of what makes this an invalid tree; None if it is valid.

        In a valid tree, parents precede their children and path probabilities do not increase along
        a path.
        """
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
        """Raise AssertionError if the tree is invalid."""
        fault = self.fault()
        assert fault is None, fault


@dataclass(frozen=True)
class Forest:
    """Several trees as one set of arrays: the nodes of the first tree, then those of the second,
    and so on.
    """

    trees: Sequence[TokenTree]
    tree_of: IntArray  # [num_nodes] int64, index of the node's tree
    parents: IntArray  # [num_nodes] int64, index in the forest; a root is its own parent
    depths: IntArray  # [num_nodes] int64
    path_probs: FloatArray  # [num_nodes] f64, as in the trees

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Concatenate trees, of which there must be at least one."""
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
        """Return the nodes except roots in canonical order: descending score, ascending depth,
        tree, node.

        If scores do not increase along a path, every prefix of this order contains the parents of
        its nodes, for all trees together as well as for each tree. Nodes of score 0 or NaN, which
        cannot be accepted, are left out.

        Args:
            scores: [num_nodes] f64.

        Returns:
            [num_reachable] int64, indices of nodes in the forest.
        """
        reachable = ((scores > 0.0) & (self.depths > 0)).nonzero()[0]
        # lexsort is stable, so nodes that tie stay in order of tree and node.
        order = np.lexsort((self.depths[reachable], -scores[reachable]))
        return reachable[order]

    def indices(self, nodes: Sequence[Sequence[int]]) -> IntArray:
        """Return the indices in the forest of nodes that are given per tree.

        Args:
            nodes: one sequence of node indices per tree.

        Returns:
            [num_nodes_given] int64.
        """
        pairs = zip(self.starts, nodes, strict=True)
        return np.concatenate(
            [start + np.asarray(tree_nodes, dtype=np.int64) for start, tree_nodes in pairs]
        )

    def nodes(self, indices: IntArray) -> list[IntArray]:
        """Return nodes of the forest as ascending node indices of each tree; roots are added."""
        is_chosen = self.depths == 0
        is_chosen[indices] = True
        chosen = np.flatnonzero(is_chosen)
        return _split(chosen - self.starts[self.tree_of[chosen]], self._sizes(chosen))

    def subtrees(self, is_taken: BoolArray) -> list[TokenTree]:
        """Return one subtree per tree, which consists of its selected nodes with unchanged path
        probabilities.

        Args:
            is_taken: [num_nodes] bool; True for all roots, and for the parent of every selected
                node.
        """
        if is_taken.all():
            return list(self.trees)
        taken = np.flatnonzero(is_taken)
        if len(self.trees) == 1:
            return [self.trees[0].subtree(taken)]
        sizes = self._sizes(taken)
        new_index = np.cumsum(is_taken) - 1  # index among the selected nodes of all trees
        firsts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        parents = new_index[self.parents[taken]] - firsts
        parents[self.depths[taken] == 0] = -1
        tokens = np.concatenate([tree.tokens for tree in self.trees])[taken]
        columns = [
            _split(c, sizes) for c in (tokens, parents, self.depths[taken], self.path_probs[taken])
        ]
        return [TokenTree(*column) for column in zip(*columns, strict=True)]

    def _sizes(self, indices: IntArray) -> IntArray:
        """Return how many of the nodes at forest indices ``indices`` each tree has.  -> [num_trees]
        int64
        """
        return np.bincount(self.tree_of[indices], minlength=len(self.trees))


def ranks_in_groups(order: IntArray, begins_group: BoolArray) -> IntArray:
    """Return the position of every node within its group, counted from 0.  -> [num_nodes] int64

    Args:
        order: [num_nodes] int64, node indices sorted by group.
        begins_group: [num_nodes] bool, True where a group begins in ``order``.
    """
    indices = np.arange(len(order))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = indices - np.maximum.accumulate(np.where(begins_group, indices, 0))
    return ranks


def ranks_by_key(keys: IntArray) -> IntArray:
    """Return for every element the number of earlier elements with the same key.  -> [n] int64

    Args:
        keys: [n] int64, non-negative.
    """
    order = np.argsort(keys, kind="stable")
    return ranks_in_groups(order, np.diff(keys[order], prepend=-1) != 0)


def _split(values: FloatArray | IntArray, sizes: IntArray) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
