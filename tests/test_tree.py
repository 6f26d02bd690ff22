"""Token trees and the canonical order of candidates, against brute force."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.algo.tree import ROOT, Candidates, TokenTree
from tests.toys import SEEDS, TIED, UNEVEN, grow, is_parent_closed, path_to, random_tree

SIZES = st.integers(1, 25)
PROBS = st.sampled_from([TIED, UNEVEN, (0.0, 1.0), (1.0,)])


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """The node itself and all above it."""
    return {node} if node == ROOT else {node, *ancestors(tree, int(tree.parents[node]))}


def described(tree: TokenTree, nodes: Iterable[int]) -> list[tuple[list[int], int, float]]:
    return [(path_to(tree, v), int(tree.depths[v]), float(tree.path_probs[v])) for v in nodes]


@given(seed=SEEDS, sizes=st.lists(SIZES, max_size=4), conditionals=PROBS)
@settings(deadline=None)
def test_candidates_stand_in_canonical_order(seed: int, sizes: list[int], conditionals: Sequence[float]) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    reachable = [(i, v) for i, tree in enumerate(trees) for v in range(1, tree.num_nodes) if tree.path_probs[v] > 0]
    reachable.sort(key=lambda at: (-trees[at[0]].path_probs[at[1]], trees[at[0]].depths[at[1]], *at))
    candidates = Candidates.of(trees)
    assert list(zip(candidates.requests.tolist(), candidates.nodes.tolist(), strict=True)) == reachable
    assert candidates.path_probs.tolist() == [trees[i].path_probs[v] for i, v in reachable]


@given(seed=SEEDS, sizes=st.lists(SIZES, max_size=4), conditionals=PROBS)
@settings(deadline=None)
def test_every_prefix_of_the_canonical_order_is_parent_closed(
    seed: int, sizes: list[int], conditionals: Sequence[float]
) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    candidates = Candidates.of(trees)
    for end in range(len(candidates.nodes) + 1):
        for index, tree in enumerate(trees):
            own = candidates.nodes[:end][candidates.requests[:end] == index]
            assert is_parent_closed(tree, own)


def test_unreachable_candidates_are_left_out() -> None:
    tree = grow([0, 0, 1, 2], [0.5, 0.0, np.nan, 1.0], [1, 2, 3, 4])
    assert Candidates.of([tree]).nodes.tolist() == [1]


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_subtree_keeps_paths_depths_and_probabilities(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, size)
    closed = {ROOT}.union(*(ancestors(tree, int(v)) for v in rng.integers(0, size, 5)))
    subtree = tree.subtree(rng.permutation(list(closed)))
    subtree.check()
    assert described(subtree, range(subtree.num_nodes)) == described(tree, np.sort(list(closed)))
    assert subtree.tokens[ROOT] == tree.tokens[ROOT]


@given(seed=SEEDS, size=SIZES, depth=st.integers(0, 8))
@settings(deadline=None)
def test_up_to_drops_exactly_the_deeper_nodes(seed: int, size: int, depth: int) -> None:
    tree = random_tree(np.random.default_rng(seed), size)
    shallow = tree.up_to(depth)
    shallow.check()
    assert described(shallow, range(shallow.num_nodes)) == described(tree, np.flatnonzero(tree.depths <= depth))
    assert shallow.max_depth == min(depth, tree.max_depth)


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_child_is_the_first_with_its_parent_and_token(seed: int, size: int) -> None:
    tree = random_tree(np.random.default_rng(seed), size)
    for node in range(size):
        for token in range(5):
            matches = [v for v in range(1, size) if tree.parents[v] == node and tree.tokens[v] == token]
            assert tree.child(node, token) == (matches[0] if matches else None)


@given(seed=SEEDS, size=SIZES)
@settings(deadline=None)
def test_ancestor_mask_marks_ancestors_and_self(seed: int, size: int) -> None:
    tree = random_tree(np.random.default_rng(seed), size)
    mask = tree.ancestor_mask()
    assert mask.shape == (size, size)
    assert [set(np.flatnonzero(row)) for row in mask] == [ancestors(tree, node) for node in range(size)]


@given(seed=SEEDS, size=SIZES, conditionals=PROBS)
@settings(deadline=None)
def test_check_accepts_trees(seed: int, size: int, conditionals: Sequence[float]) -> None:
    random_tree(np.random.default_rng(seed), size, conditionals).check()
    TokenTree.root_only(7).check()


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
def test_check_rejects_broken_trees(field: str, node: int, value: float) -> None:
    tree = grow([0, 1, 1], [0.5, 0.5, 0.5], [1, 1, 2])
    tree.check()
    broken = getattr(tree, field).copy()
    broken[node] = value
    with pytest.raises(AssertionError):
        dataclasses.replace(tree, **{field: broken}).check()
