"""Token trees of the most probable paths, from the probabilities of the tokens that may follow a
node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from hf_slospec.tree.tree import FloatArray, IntArray, TokenTree

# Distinct tokens that may follow a node, and their probabilities in [0, 1], which never rise.
Candidates = tuple[Sequence[int], Sequence[float]]
# Depth of a node, its parent's token, its token -> candidates.
Following = Callable[[int, int, int], Candidates]


def best_first_tree(
    root_token: int, tokens: IntArray, probs: FloatArray, max_nodes: int
) -> TokenTree:
    """Return the tree of the most probable prefixes; the probability of a prefix is the product
    over its tokens.

    The candidates of a position are the same after every prefix, as block drafters predict them
    (DDTree).

    Args:
        root_token: last committed token.
        tokens: [depth, num_candidates] int64, distinct candidates for every position after the
            root.
        probs: [depth, num_candidates] f64 in [0, 1], never rising along a row.
        max_nodes: maximum number of nodes, root not counted.
    """
    assert tokens.shape == probs.shape and tokens.ndim == 2
    # Python floats are faster to compare than numpy's.
    levels = list(zip(tokens.tolist(), probs.tolist(), strict=True))
    return grown_tree(
        -1, root_token, lambda depth, above, token: levels[depth], len(levels), max_nodes
    )


def grown_tree(
    above_root: int, root_token: int, following: Following, max_depth: int, max_nodes: int
) -> TokenTree:
    """Return the tree of the most probable paths; the probability of a path is the product over its
    tokens.

    No other tree with as many nodes has a larger sum of path probabilities. Each node taken adds
    two to the heap: its parent's next candidate, and its own first one. Nodes of path probability 0
    are left out.

    Args:
        above_root: the token before the root; only ``following`` reads it.
        root_token: last committed token.
        following: returns the candidates after a node; it is called once per node that is taken.
        max_depth: maximum depth of a node.
        max_nodes: maximum number of nodes, root not counted.

    Returns:
        The tree with its nodes in canonical order: path probability descending, depth ascending,
            then order of the
        parent and rank among the candidates.
    """
    tokens = [root_token]
    parents = [-1]
    depths = [0]
    path_probs = [1.0]
    candidates = [following(0, above_root, root_token) if max_depth > 0 else ((), ())]  # by node
    heap: list[tuple[float, int, int, int]] = []  # -path probability, depth, parent, rank
    if candidates[0][0]:
        heap.append((-candidates[0][1][0], 1, 0, 0))
    while heap and len(tokens) <= max_nodes:
        negative, depth, parent, rank = heappop(heap)
        if not negative < 0.0:
            break
        node = len(tokens)
        (siblings, probs) = candidates[parent]
        token = siblings[rank]
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        path_probs.append(-negative)
        if rank + 1 < len(siblings):
            heappush(heap, (-path_probs[parent] * probs[rank + 1], depth, parent, rank + 1))
        candidates.append(
            following(depth, tokens[parent], token) if depth < max_depth else ((), ())
        )
        if candidates[node][0]:
            heappush(heap, (negative * candidates[node][1][0], depth + 1, node, 0))
    return TokenTree(np.array(tokens), np.array(parents), np.array(depths), np.array(path_probs))
