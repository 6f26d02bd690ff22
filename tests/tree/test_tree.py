"""Token trees, forests and the canonical order of their nodes, against brute force."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.tree.tree import ROOT, Forest
from tests.support.toys.trees import (
    SEEDS,
    TIED,
    UNEVEN,
    grow,
    is_parent_closed,
    path_to,
    random_tree,
)

SIZES = st.integers(1, 25)
PROBS = st.sampled_from([TIED, UNEVEN, (0.0, 1.0), (1.0,)])
# One per tree; some tie.
WEIGHTS = st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.3]), min_size=4, max_size=4)


def ancestors(tree, node):
    """The node itself and all above it."""
    return {node} if node == ROOT else {node, *ancestors(tree, int(tree.parents[node]))}


def described(tree, nodes):
    return [(path_to(tree, v), int(tree.depths[v]), float(tree.path_probs[v])) for v in nodes]


def weighted(trees, weights):
    """Scores of a forest's nodes: path probabilities times one weight per tree."""
    return np.concatenate(
        [tree.path_probs * weight for tree, weight in zip(trees, weights, strict=True)]
    )


@given(
    seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4), conditionals=PROBS, weights=WEIGHTS
)
@settings(deadline=None)
def test_nodes_stand_in_canonical_order(seed, sizes, conditionals, weights):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    forest = Forest.of(trees)
    scores = weighted(trees, weights[: len(trees)])
    everywhere = [(i, v) for i, tree in enumerate(trees) for v in range(tree.num_nodes)]
    expected = [
        at for at in range(len(everywhere)) if everywhere[at][1] != ROOT and scores[at] > 0.0
    ]
    expected.sort(
        key=lambda at: (
            -scores[at],
            trees[everywhere[at][0]].depths[everywhere[at][1]],
            everywhere[at],
        )
    )
    assert forest.canonical(scores).tolist() == expected


@given(
    seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4), conditionals=PROBS, weights=WEIGHTS
)
@settings(deadline=None)
def test_every_prefix_of_the_canonical_order_is_parent_closed(seed, sizes, conditionals, weights):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    forest = Forest.of(trees)
    order = forest.canonical(weighted(trees, weights[: len(trees)]))
    for end in range(len(order) + 1):
        assert all(
            is_parent_closed(t, own)
            for t, own in zip(trees, forest.nodes(order[:end]), strict=True)
        )


def test_unreachable_nodes_are_left_out():
    tree = grow([0, 0, 1, 2], [0.5, 0.0, np.nan, 1.0], [1, 2, 3, 4])
    assert Forest.of([tree]).canonical(tree.path_probs).tolist() == [1]


@given(seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4))
@settings(deadline=None)
def test_a_forest_holds_its_trees_one_after_the_other(seed, sizes):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size) for size in sizes]
    forest = Forest.of(trees)
    assert forest.starts.tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
    for index, (tree, start) in enumerate(zip(trees, forest.starts.tolist(), strict=True)):
        own = np.flatnonzero(forest.tree_of == index)
        assert own.tolist() == list(range(start, start + tree.num_nodes))
        # A root is its own parent.
        assert forest.parents[own].tolist() == [start, *(start + tree.parents[1:])]
        assert forest.depths[own].tolist() == tree.depths.tolist()
        assert forest.path_probs[own].tolist() == tree.path_probs.tolist()


@given(seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4))
@settings(deadline=None)
def test_nodes_and_indices_name_the_same_nodes(seed, sizes):
    rng = np.random.default_rng(seed)
    forest = Forest.of([random_tree(rng, size) for size in sizes])
    chosen = [sorted({ROOT, *rng.integers(0, size, 3).tolist()}) for size in sizes]
    indices = forest.indices(chosen)
    assert indices.tolist() == [
        start + v for start, own in zip(forest.starts, chosen, strict=True) for v in own
    ]
    assert [own.tolist() for own in forest.nodes(rng.permutation(indices))] == chosen
    inner = forest.indices([own[1:] for own in chosen])  # some trees may have none
    assert [own.tolist() for own in forest.nodes(inner)] == chosen  # roots come along


@given(seed=SEEDS, sizes=st.lists(SIZES, min_size=1, max_size=4), conditionals=PROBS)
@settings(deadline=None)
def test_subtrees_of_a_forest_are_those_of_its_trees(seed, sizes, conditionals):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    forest = Forest.of(trees)
    closed = [
        {ROOT}.union(*(ancestors(tree, int(v)) for v in rng.integers(0, tree.num_nodes, 3)))
        for tree in trees
    ]
    is_taken = np.zeros(len(forest.depths), dtype=np.bool_)
    is_taken[forest.indices([sorted(own) for own in closed])] = True
    for own, tree, nodes in zip(forest.subtrees(is_taken), trees, closed, strict=True):
        own.check()
        expected = tree.subtree(np.array(list(nodes)))
        for name in ("tokens", "parents", "depths", "path_probs"):
            assert getattr(own, name).tolist() == getattr(expected, name).tolist()


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_subtree_keeps_paths_depths_and_probabilities(seed, size):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, size)
    closed = {ROOT}.union(*(ancestors(tree, int(v)) for v in rng.integers(0, size, 5)))
    subtree = tree.subtree(rng.permutation(list(closed)))
    subtree.check()
    assert described(subtree, range(subtree.num_nodes)) == described(tree, np.sort(list(closed)))
    assert subtree.tokens[ROOT] == tree.tokens[ROOT]


@given(seed=SEEDS, size=SIZES, depth=st.integers(0, 8))
@settings(deadline=None)
def test_up_to_drops_exactly_the_deeper_nodes(seed, size, depth):
    tree = random_tree(np.random.default_rng(seed), size)
    shallow = tree.up_to(depth)
    shallow.check()
    assert described(shallow, range(shallow.num_nodes)) == described(
        tree, np.flatnonzero(tree.depths <= depth)
    )
    assert shallow.max_depth == min(depth, tree.max_depth)


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_child_is_the_first_with_its_parent_and_token(seed, size):
    tree = random_tree(np.random.default_rng(seed), size)
    for node in range(size):
        for token in range(5):
            matches = [
                v for v in range(1, size) if tree.parents[v] == node and tree.tokens[v] == token
            ]
            assert tree.child(node, token) == (matches[0] if matches else None)


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_ancestor_mask_marks_ancestors_and_self(seed, size):
    tree = random_tree(np.random.default_rng(seed), size)
    mask = tree.ancestor_mask()
    assert mask.shape == (size, size)
    assert [set(np.flatnonzero(row)) for row in mask] == [
        ancestors(tree, node) for node in range(size)
    ]


@pytest.mark.parametrize(
    ("field", "node", "value"),
    [
        ("parents", 0, 0),
        ("parents", 1, -1),
        ("parents", 1, 1),
        ("parents", 2, 3),
        ("depths", 0, 1),
        ("depths", 2, 1),
        ("depths", 3, 3),
        ("path_probs", 0, 0.9),
        ("path_probs", 2, 0.6),
        ("path_probs", 3, -0.1),
        ("path_probs", 3, np.nan),
    ],
)
def test_check_rejects_broken_trees(field, node, value):
    tree = grow([0, 1, 1], [0.5, 0.5, 0.5], [1, 1, 2])
    tree.check()
    broken = getattr(tree, field).copy()
    broken[node] = value
    with pytest.raises(AssertionError):
        dataclasses.replace(tree, **{field: broken}).check()
