"""Union of the token trees that several sources propose for the same request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import FloatArray, Forest, TokenTree


def merge_forests(
    forests: Sequence[Forest], conditionals: Sequence[FloatArray], max_nodes: int | None = None
) -> list[TokenTree]:
    """Return the union of the trees of every request.

    Nodes with the same path of tokens become one node. Its conditional is the largest that a source gives it, and
    siblings' conditionals that sum to more than 1 are scaled to a sum of 1, as at most one sibling is committed. Path
    probabilities are the products of these. (The larger of the sources' path probabilities would be too small where one
    source finds the parent likely and another one the child.) They never rise along a path, so in the canonical order
    (path probability descending, depth ascending, source, node) parents precede children and every prefix is a tree.

    Args:
        forests: one per source, each with one tree per request, the requests in the same order.
        conditionals: [num_nodes] f64 in [0, 1] for every forest: probabilities given that the parent is committed,
            comparable between sources. Entries of roots are not read.
        max_nodes: nodes to keep per request, the first in canonical order, root not counted; None: all.
    """
    sizes = [len(forest.depths) for forest in forests]
    parents = np.concatenate([forest.parents for forest in forests]) + np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    depths = np.concatenate([forest.depths for forest in forests])
    tokens = np.concatenate([tree.tokens for forest in forests for tree in forest.trees])
    tree_of = np.concatenate([forest.tree_of for forest in forests])
    probs = np.concatenate(conditionals)
    roots, num_ids = np.flatnonzero(depths == 0), int(tokens.max()) + 1
    assert (tokens[roots] == tokens[roots[tree_of[roots]]]).all(), "trees of a request differ in their root tokens"

    # The name of a merged node is the index of the first given node with its path.
    name_of = np.arange(len(depths))
    name_of[roots] = roots[tree_of[roots]]
    path_probs = np.ones(len(depths))  # [num_nodes] f64, indexed by the merged nodes' names
    for depth in range(1, int(depths.max()) + 1):
        layer = np.flatnonzero(depths == depth)
        above = name_of[parents[layer]]
        _, firsts, inverse = np.unique(above * num_ids + tokens[layer], return_index=True, return_inverse=True)
        name_of[layer] = layer[firsts][inverse]
        best = np.zeros(len(firsts))
        np.maximum.at(best, inverse, probs[layer])
        above = above[firsts]
        sibling_sums = np.bincount(above, best)[above]
        path_probs[layer[firsts]] = path_probs[above] * best / np.maximum(sibling_sums, 1.0)

    names = np.flatnonzero(name_of == np.arange(len(depths)))
    names = names[np.lexsort((depths[names], -path_probs[names], tree_of[names]))]  # stable: ties stay in order
    node_of = np.empty(len(depths), dtype=np.int64)  # node in the merged tree, by name
    ends = np.cumsum(np.bincount(tree_of[names], minlength=len(roots) // len(forests)))
    merged = []
    for tree_names in np.split(names, ends[:-1]):
        kept = tree_names if max_nodes is None else tree_names[: max_nodes + 1]
        node_of[kept] = np.arange(len(kept))
        new_parents = node_of[name_of[parents[kept]]]
        new_parents[0] = -1
        merged.append(TokenTree(tokens[kept], new_parents, depths[kept], path_probs[kept]))
    return merged
