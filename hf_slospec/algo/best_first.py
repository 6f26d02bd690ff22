"""Token trees from the independent distributions that block drafters predict for the next positions."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree


def best_first_tree(root_token: int, tokens: IntArray, probs: FloatArray, max_nodes: int) -> TokenTree:
    """Return the tree of the most probable prefixes; the probability of a prefix is the product over its tokens.

    No other tree with as many nodes has a larger sum of path probabilities (DDTree). Each prefix taken adds two to the
    heap: the same prefix with the next candidate for its last position, and the prefix extended by the first candidate
    for the following position. Prefixes of probability 0 are left out.

    Args:
        root_token: last committed token.
        tokens: [depth, num_candidates] int64, distinct candidates for every position after the root.
        probs: [depth, num_candidates] f64 in [0, 1], never rising along a row.
        max_nodes: maximum number of nodes, root not counted.

    Returns:
        The tree with its nodes in canonical order: path probability descending, depth ascending, then order of the
        parent and rank among the candidates.
    """
    assert tokens.shape == probs.shape and tokens.ndim == 2
    depth, num_candidates = tokens.shape
    levels = probs.tolist()  # single Python floats are faster to compare than numpy's
    parents, depths, path_probs, ranks = [-1], [0], [1.0], [-1]
    heap: list[tuple[float, int, int, int, float]] = []  # -path probability, depth, parent, rank, parent's probability
    if depth and num_candidates:
        heap.append((-levels[0][0], 1, 0, 0, 1.0))
    while heap and len(parents) <= max_nodes:
        negative, level, parent, rank, parent_prob = heappop(heap)
        if not negative < 0.0:
            break
        node = len(parents)
        parents.append(parent)
        depths.append(level)
        path_probs.append(-negative)
        ranks.append(rank)
        if rank + 1 < num_candidates:
            heappush(heap, (-parent_prob * levels[level - 1][rank + 1], level, parent, rank + 1, parent_prob))
        if level < depth:
            heappush(heap, (negative * levels[level][0], level + 1, node, 0, -negative))
    chosen = tokens[np.array(depths[1:], dtype=np.int64) - 1, np.array(ranks[1:], dtype=np.int64)]
    tree_tokens = np.concatenate(([root_token], chosen)).astype(np.int64)
    return TokenTree(tree_tokens, np.array(parents), np.array(depths), np.array(path_probs))
