"""Merging of token trees, against brute force over paths of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.tree.merge import merge_trees
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.trees import SEEDS, TIED, UNEVEN, chain, grow, path_to, random_tree

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=3)  # one tree per source
PROBS = st.sampled_from([TIED, UNEVEN, (0.0, 1.0)])
Path = tuple[int, ...]


def merge(trees, max_nodes=None):
    [merged] = merge_trees([trees], max_nodes)
    return merged


def brute_force(trees):
    """Path probability of every path."""
    given = {}
    for tree in trees:
        for node in range(tree.num_nodes):
            path = tuple(path_to(tree, node))
            parent = tree.path_probs[tree.parents[node]]
            own = float(tree.path_probs[node] / parent) if node and parent > 0.0 else 0.0
            given[path] = max(given.get(path, 0.0), own)
    probs = {(): 1.0}
    for path in sorted(given, key=len)[1:]:
        total = sum(prob for other, prob in given.items() if other and other[:-1] == path[:-1])
        probs[path] = probs[path[:-1]] * given[path] / max(total, 1.0)
    return probs


def random_trees(seed, sizes, conditionals):
    rng = np.random.default_rng(seed)
    return [random_tree(rng, size, conditionals) for size in sizes]


@given(seed=SEEDS, sizes=SIZES, conditionals=PROBS)
@settings(deadline=None)
def test_union_of_paths(seed, sizes, conditionals):
    trees = random_trees(seed, sizes, conditionals)
    merged = merge(trees)
    merged.check()
    expected = brute_force(trees)
    paths = [tuple(path_to(merged, node)) for node in range(merged.num_nodes)]
    assert len(set(paths)) == len(paths) and set(paths) == expected.keys()
    assert merged.path_probs.tolist() == pytest.approx([expected[path] for path in paths])


@given(seed=SEEDS, sizes=SIZES, conditionals=PROBS, max_nodes=st.integers(0, 12))
@settings(deadline=None)
def test_canonical_order_and_its_prefixes(seed, sizes, conditionals, max_nodes):
    trees = random_trees(seed, sizes, conditionals)
    tree = merge(trees)
    first = merge(trees, max_nodes)
    assert sorted(zip(-tree.path_probs, tree.depths, strict=True)) == list(
        zip(-tree.path_probs, tree.depths, strict=True)
    )
    first.check()
    kept = slice(0, max_nodes + 1)
    assert [path_to(first, node) for node in range(first.num_nodes)] == [
        path_to(tree, node) for node in range(tree.num_nodes)[kept]
    ]
    assert first.path_probs.tolist() == tree.path_probs[kept].tolist()


@given(seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4))
@settings(deadline=None)
def test_requests_together_are_as_each_by_itself(seed, sizes):
    rng = np.random.default_rng(seed)
    by_request = [[random_tree(rng, size, UNEVEN) for size in own] for own in sizes]
    for own, trees in zip(merge_trees(by_request, 9), by_request, strict=True):
        alone = merge(trees, 9)
        for name in ("tokens", "parents", "depths", "path_probs"):
            assert getattr(own, name).tolist() == getattr(alone, name).tolist()


def test_one_source_may_know_the_parent_and_another_the_child():
    merged = merge([chain(0.9, 0.1), chain(0.2, 0.8)])
    assert merged.path_probs.tolist() == pytest.approx([1.0, 0.9, 0.72])


def test_siblings_share_a_probability_of_one():
    merged = merge([grow([0], [0.9], [1]), grow([0], [0.6], [2])])
    assert merged.tokens.tolist() == [0, 1, 2]
    assert merged.path_probs.tolist() == pytest.approx([1.0, 0.6, 0.4])


def test_root_tokens_must_agree():
    with pytest.raises(AssertionError, match="root tokens"):
        merge([TokenTree.root_only(1), TokenTree.root_only(2)])
