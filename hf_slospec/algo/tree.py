"""Token trees: the candidate tree a draft proposes and the draft tree that is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ROOT = 0


@dataclass(frozen=True)
class TokenTree:
    """One request's token tree. Node 0 is the root, the last committed token; parents stand before children.

    ``path_probs[v]`` is f(v): f(root) = 1, f(v) = f(parent) * c(v) with the conditional c(v) in [0, 1], so f never
    rises along a path. With f the true probability that the verifier commits a path, the expected number of
    committed tokens of a step is ``path_probs.sum()`` (AdaServe, theorem 3.1).
    """

    tokens: IntArray  # [num_nodes] int64
    parents: IntArray  # [num_nodes] int64, -1 at the root
    depths: IntArray  # [num_nodes] int64, 0 at the root
    path_probs: FloatArray  # [num_nodes] f64

    @classmethod
    def root_only(cls, token: int) -> TokenTree:
        return cls(np.array([token]), np.array([-1]), np.array([0]), np.array([1.0]))

    @classmethod
    def chain(cls, root_token: int, tokens: Sequence[int], conditional: float) -> TokenTree:
        """A tree of one path: ``tokens`` after the root, each accepted after its parent with this probability."""
        depths = np.arange(len(tokens) + 1)
        return cls(np.array([root_token, *tokens]), depths - 1, depths, np.asarray(conditional**depths, np.float64))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    @cached_property
    def _child_by_token(self) -> dict[tuple[int, int], int]:
        # Reversed, so that of two equal children the better one (the earlier) stays.
        nodes = range(self.num_nodes - 1, ROOT, -1)
        return {(int(self.parents[v]), int(self.tokens[v])): v for v in nodes}

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, if the tree has it."""
        return self._child_by_token.get((node, token))

    def subtree(self, nodes: IntArray) -> TokenTree:
        """The tree of ``nodes`` (root included, parent-closed), in ascending order of node."""
        nodes = np.sort(nodes)
        parents = np.searchsorted(nodes, self.parents[nodes])
        parents[0] = -1
        return TokenTree(self.tokens[nodes], parents, self.depths[nodes], self.path_probs[nodes])

    def up_to(self, depth: int) -> TokenTree:
        """The tree without its nodes deeper than ``depth``."""
        return self if self.max_depth <= depth else self.subtree(np.flatnonzero(self.depths <= depth))

    def ancestor_mask(self) -> BoolArray:
        """True where a row's node may attend to a column's: its ancestors and itself.  -> [num_nodes, num_nodes]"""
        mask = np.eye(self.num_nodes, dtype=np.bool_)
        for node in range(1, self.num_nodes):  # parents first, so a parent's row is complete when it is copied
            mask[node] |= mask[self.parents[node]]
        return mask

    def fault(self) -> str | None:
        """Why this is not a tree with parents first and path probabilities that never rise; None if it is one."""
        if len({len(self.tokens), len(self.parents), len(self.depths), len(self.path_probs)}) > 1:
            return "tokens, parents, depths and path_probs differ in length"
        if not self.num_nodes or self.parents[0] != -1 or self.depths[0] != 0 or self.path_probs[0] != 1.0:
            return "node 0 is not a root: parent -1, depth 0, path probability 1"
        inner, parents = slice(1, None), self.parents[1:]
        if not ((parents >= 0) & (parents < np.arange(1, self.num_nodes))).all():
            return "a child stands before its parent"
        if not (self.depths[inner] == self.depths[parents] + 1).all():
            return "a child is not one deeper than its parent"
        if not (self.path_probs[inner] <= self.path_probs[parents]).all() or not (self.path_probs >= 0).all():
            return "path probabilities rise along a path, or are negative"
        return None

    def check(self) -> None:
        """Raise AssertionError if the tree has a fault."""
        fault = self.fault()
        assert fault is None, fault


@dataclass(frozen=True)
class Candidates:
    """All non-root nodes of several candidate trees in canonical order: f descending, depth ascending, request, node.

    Path probabilities never rise along a path and a parent is less deep than its child, so every prefix of this
    order, of all trees or of one, is parent-closed. Nodes that no verifier can reach (f = 0 or NaN) are left out.
    """

    requests: IntArray  # [num_candidates] int64, index of the tree
    nodes: IntArray  # [num_candidates] int64, index of the node in its tree
    path_probs: FloatArray  # [num_candidates] f64

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Candidates:
        counts = [tree.num_nodes - 1 for tree in trees]
        requests = np.repeat(np.arange(len(trees)), counts)
        nodes = np.concatenate([np.arange(1, count + 1) for count in counts]) if trees else np.empty(0, np.int64)
        depths = np.concatenate([tree.depths[1:] for tree in trees]) if trees else nodes
        path_probs = np.concatenate([tree.path_probs[1:] for tree in trees]) if trees else np.empty(0)
        order = np.lexsort((nodes, requests, depths, -path_probs))
        order = order[path_probs[order] > 0.0]
        return cls(requests[order], nodes[order], path_probs[order])
