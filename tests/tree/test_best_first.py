"""Best-first trees against all parent-closed sets of prefixes."""

from __future__ import annotations

import functools
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.tree.best_first import best_first_tree, grown_tree
from tests.support.toys.trees import SEEDS, TIED, path_to


def random_block(rng, depth, width, is_tied):
    """Candidates of every position, which share no token, and their probabilities in descending
    order.
    """
    tokens = 10 + rng.permutation(depth * width).reshape(depth, width)
    probs = (
        rng.choice(TIED, (depth, width))
        if is_tied
        else rng.dirichlet(np.full(width + 1, 0.4), depth)[:, :width]
    )
    return tokens, -np.sort(-probs, axis=1)


def prefixes_of(tree, tokens):
    """The nodes below the root, in their order, as ranks."""
    paths = [path_to(tree, node) for node in range(1, tree.num_nodes)]
    return [
        tuple(tokens[level].tolist().index(token) for level, token in enumerate(path))
        for path in paths
    ]


def canonical(probs):
    """All prefixes of positive probability: by probability, then by depth, then by parent and rank."""
    depth, width = probs.shape
    of = {(): 1.0}
    for level in range(1, depth + 1):
        for prefix in itertools.product(range(width), repeat=level):
            of[prefix] = of[prefix[:-1]] * float(probs[level - 1, prefix[-1]])
    place = {(): 0}
    waiting = {prefix for prefix, prob in of.items() if prefix and prob > 0.0}
    while waiting:
        ready = [prefix for prefix in waiting if prefix[:-1] in place]
        best = min(
            ready, key=lambda prefix: (-of[prefix], len(prefix), place[prefix[:-1]], prefix[-1])
        )
        place[best] = len(place)
        waiting.remove(best)
    return [(of[prefix], prefix) for prefix in place if prefix]


@given(
    seed=SEEDS,
    depth=st.integers(0, 4),
    width=st.integers(1, 3),
    max_nodes=st.integers(0, 130),
    is_tied=st.booleans(),
)
@settings(deadline=None)
def test_nodes_are_the_first_prefixes_in_canonical_order(seed, depth, width, max_nodes, is_tied):
    tokens, probs = random_block(np.random.default_rng(seed), depth, width, is_tied)
    tree = best_first_tree(7, tokens, probs, max_nodes)
    tree.check()
    expected = canonical(probs)[:max_nodes]
    assert prefixes_of(tree, tokens) == [prefix for _, prefix in expected]
    assert tree.path_probs[1:].tolist() == [prob for prob, _ in expected]
    assert (
        int(tree.tokens[0]) == 7
        and tree.tokens.dtype == tree.parents.dtype == tree.depths.dtype == np.int64
    )


def test_impossible_prefixes_are_left_out():
    tokens = np.array([[4, 5], [6, 7]])
    probs = np.array([[1.0, 0.0], [0.0, 0.0]])
    assert best_first_tree(3, tokens, probs, 5).tokens.tolist() == [3, 4]
    unknown = np.array([[np.nan, np.nan]])
    assert best_first_tree(3, tokens[:1], unknown, 5).num_nodes == 1


@given(seed=SEEDS, depth=st.integers(0, 3), max_nodes=st.integers(0, 40), is_tied=st.booleans())
@settings(deadline=None)
def test_candidates_may_depend_on_the_path(seed, depth, max_nodes, is_tied):
    rng = np.random.default_rng(seed)

    @functools.cache
    def table(above, token):
        return random_block(rng, 1, 3, is_tied)

    def following(level, above, token):
        tokens, probs = table(above, token)
        return tokens[0].tolist(), probs[0].tolist()

    paths = {}  # all of them, behind the root and what precedes it
    layer = {(-1, 7): 1.0}
    for level in range(depth):
        layer = {
            (*path, token): path_prob * prob
            for path, path_prob in layer.items()
            for token, prob in zip(*following(level, *path[-2:]), strict=True)
            if path_prob * prob > 0.0
        }
        paths |= layer
    tree = grown_tree(-1, 7, following, depth, max_nodes)
    tree.check()
    found = {
        (-1, 7, *path_to(tree, node)): tree.path_probs[node] for node in range(1, tree.num_nodes)
    }
    assert found.items() <= paths.items()
    assert list(found.values()) == sorted(paths.values(), reverse=True)[:max_nodes]
