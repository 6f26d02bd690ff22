"""Merging of the candidate trees that several drafters propose for the same request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.acceptance import Conditionals
from hf_slospec.tree.tree import Forest, TokenTree


def merge_trees(
    proposed: Sequence[Sequence[TokenTree]], max_nodes: int | None = None
) -> list[TokenTree]:
    """Return one tree per request, the union of the request's candidate trees.

    Nodes with the same path of tokens become one node. Its conditional probability (given its
    parent) is the largest one in any tree; if those of siblings sum to more than 1, they are scaled
    to a sum of 1, as at most one sibling is committed. Path probabilities are products of these
    conditionals. (The largest path probability in any tree would be too small if one tree finds the
    parent likely and another tree the child.) They do not increase along a path, so in canonical
    order (descending path probability, ascending depth, tree, node) parents precede children and
    every prefix is a tree.

    Args:
        proposed: at least one tree per request, all with the request's root token.
        max_nodes: nodes to keep per request, root excluded: the first ones in canonical order;
            None: all.

    Returns:
        One tree per request.
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

    # A merged node is named by the forest index of the first node that has its path.
    name_of = np.arange(len(depths))
    name_of[roots] = first_roots
    path_probs = np.ones(len(depths))  # [num_nodes] f64, indexed by names of merged nodes
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
    # lexsort is stable, so nodes that tie stay in forest order.
    names = names[np.lexsort((depths[names], -path_probs[names], request_of[names]))]
    node_of = np.empty(len(depths), dtype=np.int64)  # name -> node index in the merged tree
    ends = np.cumsum(np.bincount(request_of[names]))
    merged = []
    for tree_names in np.split(names, ends[:-1]):
        kept = tree_names if max_nodes is None else tree_names[: max_nodes + 1]
        node_of[kept] = np.arange(len(kept))
        new_parents = node_of[name_of[forest.parents[kept]]]
        new_parents[0] = -1
        merged.append(TokenTree(tokens[kept], new_parents, depths[kept], path_probs[kept]))
    return merged
