"""Union of the token trees that several sources propose for the same request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.acceptance import Conditionals
from hf_slospec.tree.tree import Forest, TokenTree


def merge_trees(
    proposed: Sequence[Sequence[TokenTree]], max_nodes: int | None = None
) -> list[TokenTree]:
    """Return the union of the trees of every request.

    Nodes with the same path of tokens become one node. Its probability given its parent is the
    largest in any tree, and siblings' probabilities that sum to more than 1 are scaled to a sum of
    1, as at most one sibling is committed. Path probabilities are the products of these. (The
    larger of the trees' path probabilities would be too small where one tree finds the parent
    likely and another one the child.) They never rise along a path, so in the canonical order (path
    probability descending, depth ascending, tree, node) parents precede children and every prefix
    is a tree.

    Args:
        proposed: at least one tree per request.
        max_nodes: nodes to keep per request, the first in canonical order, root not counted; None:
            all.
    """
    forest = Forest.of([tree for trees in proposed for tree in trees])
    counts = [len(trees) for trees in proposed]
    request_of = np.repeat(np.arange(len(counts)), counts)[forest.tree_of]  # [num_nodes] int64
    tokens = np.concatenate([tree.tokens for tree in forest.trees])
    depths = forest.depths
    probs = Conditionals.of(forest).probs
    roots = forest.starts
    num_ids = int(tokens.max()) + 1
    first_roots = np.repeat(roots[np.cumsum([0, *counts[:-1]])], counts)  # [num_trees] int64
    assert (tokens[roots] == tokens[first_roots]).all(), (
        "trees of a request differ in their root tokens"
    )

    # The name of a merged node is the index of the first given node with its path.
    name_of = np.arange(len(depths))
    name_of[roots] = first_roots
    path_probs = np.ones(len(depths))  # [num_nodes] f64, indexed by the merged nodes' names
    for depth in range(1, int(depths.max()) + 1):
        layer = np.flatnonzero(depths == depth)
        above = name_of[forest.parents[layer]]
        _, firsts, inverse = np.unique(
            above * num_ids + tokens[layer], return_index=True, return_inverse=True
        )
        name_of[layer] = layer[firsts][inverse]
        best = np.zeros(len(firsts))
        np.maximum.at(best, inverse, probs[layer])
        above = above[firsts]
        sibling_sums = np.bincount(above, best)[above]
        path_probs[layer[firsts]] = path_probs[above] * best / np.maximum(sibling_sums, 1.0)

    names = np.flatnonzero(name_of == np.arange(len(depths)))
    # Stable: ties stay in order.
    names = names[np.lexsort((depths[names], -path_probs[names], request_of[names]))]
    node_of = np.empty(len(depths), dtype=np.int64)  # node in the merged tree, by name
    ends = np.cumsum(np.bincount(request_of[names]))
    merged = []
    for tree_names in np.split(names, ends[:-1]):
        kept = tree_names if max_nodes is None else tree_names[: max_nodes + 1]
        node_of[kept] = np.arange(len(kept))
        new_parents = node_of[name_of[forest.parents[kept]]]
        new_parents[0] = -1
        merged.append(TokenTree(tokens[kept], new_parents, depths[kept], path_probs[kept]))
    return merged
