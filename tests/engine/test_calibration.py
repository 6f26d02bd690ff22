"""Calibrated conditionals: true frequencies, connected trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.acceptance import (
    Calibration,
    Conditionals,
    path_products,
    shifted,
    tried_and_hit,
)
from hf_slospec.tree.accept import accept
from hf_slospec.tree.tree import ROOT, Forest, TokenTree
from tests.support.toys.trees import SEEDS, TIED, UNEVEN, grow, random_tree

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=4)
PROBS = st.sampled_from([TIED, UNEVEN, (1.0,)])


def children(*conditionals):
    """A root with these children, whose tokens are 1, 2, ..."""
    return Forest.of([grow([0] * len(conditionals), conditionals, range(1, len(conditionals) + 1))])


def random_forest(seed, sizes, conditionals=UNEVEN):
    rng = np.random.default_rng(seed)
    return Forest.of([random_tree(rng, size, conditionals) for size in sizes])


def with_probs(forest, path_probs):
    """The trees with other path probabilities."""
    parts = np.split(path_probs, forest.starts[1:])
    return [
        TokenTree(t.tokens, t.parents, t.depths, own)
        for t, own in zip(forest.trees, parts, strict=True)
    ]


@given(seed=SEEDS, sizes=SIZES, conditionals=PROBS)
@settings(deadline=None)
def test_conditionals_and_ranks(seed, sizes, conditionals):
    forest = random_forest(seed, sizes, conditionals)
    found = Conditionals.of(forest)
    for start, tree in zip(forest.starts, forest.trees, strict=True):
        for v in range(1, tree.num_nodes):
            parent = tree.parents[v]
            above = tree.path_probs[parent]
            assert found.probs[start + v] == (
                min(tree.path_probs[v] / above, 1.0) if above > 0.0 else 0.0
            )
            assert found.ranks[start + v] == sum(tree.parents[1:v] == parent)


@given(seed=SEEDS, sizes=SIZES, conditionals=PROBS)
@settings(deadline=None)
def test_path_products_follow_paths_and_keep_zeros(seed, sizes, conditionals):
    forest = random_forest(seed, sizes, conditionals)
    given_probs = np.random.default_rng(seed).random(len(forest.depths))

    def product(node):
        if forest.depths[node] == 0:
            return 1.0
        return (
            0.0
            if forest.path_probs[node] == 0.0
            else given_probs[node] * product(int(forest.parents[node]))
        )

    expected = [product(node) for node in range(len(forest.depths))]
    np.testing.assert_allclose(path_products(forest, given_probs), expected)
    np.testing.assert_allclose(
        path_products(forest, Conditionals.of(forest).probs), forest.path_probs
    )


@given(c=st.floats(0, 1), shift=st.floats(-5, 5))
def test_shifts_move_log_odds(c, shift):
    (moved,) = shifted(np.array([c]), np.array([shift]))
    assert 0.0 <= moved <= 1.0
    if 1e-6 < c < 1.0 - 1e-6:
        assert math.log(moved / (1.0 - moved)) == pytest.approx(
            math.log(c / (1.0 - c)) + shift, abs=1e-6
        )
    if c in (0.0, 1.0):
        assert moved == c


@given(seed=SEEDS, sizes=SIZES)
@settings(deadline=None)
def test_children_of_committed_nodes_were_tried(seed, sizes):
    rng = np.random.default_rng(seed)
    forest = random_forest(seed, sizes)
    paths = [
        accept(tree, lambda _: int(rng.integers(4)), lambda token: token) for tree in forest.trees
    ]
    committed = {
        int(start) + v for start, path in zip(forest.starts, paths, strict=True) for v in path
    }
    was_tried, was_hit = tried_and_hit(forest, np.array(sorted(committed), dtype=np.int64))
    inner = set(np.flatnonzero(forest.depths > 0).tolist())
    assert set(np.flatnonzero(was_hit).tolist()) == committed
    heads = committed | set(forest.starts.tolist())
    assert set(np.flatnonzero(was_tried).tolist()) == {
        v for v in inner if forest.parents[v] in heads
    }


def test_without_observations_nothing_changes():
    conditionals = Conditionals.of(children(0.5, 0.3))
    np.testing.assert_allclose(Calibration()(conditionals)[1:], [0.5, 0.3])


def test_greedy_targets_are_believed_to_take_favourites_more_often():
    conditionals = Conditionals.of(children(0.25, 0.2))
    np.testing.assert_allclose(Calibration(favourite_exponent=0.5)(conditionals)[1:], [0.5, 0.2])


@pytest.mark.parametrize(("says", "is_true"), [((0.5, 0.3), (0.8, 0.1)), ((0.9, 0.05), (0.2, 0.4))])
def test_converges_to_true_frequencies(says, is_true):
    rng = np.random.default_rng(0)
    calibration = Calibration()
    forest = children(*says)
    conditionals = Conditionals.of(forest)
    for _ in range(3000):
        token = int(rng.choice(3, p=[1 - sum(is_true), *is_true]))
        accepted = np.array([token] if token else [], dtype=np.int64)
        calibration.observe(conditionals, *tried_and_hit(forest, accepted))
    np.testing.assert_allclose(calibration(conditionals)[1:], is_true, atol=0.04)
    assert calibration.trials.max() <= Calibration.MEMORY


def test_old_frequencies_fade():
    calibration = Calibration()
    forest = children(0.5)
    conditionals = Conditionals.of(forest)
    for accepted in ([], [1]):
        for _ in range(int(5 * Calibration.MEMORY)):
            calibration.observe(
                conditionals, *tried_and_hit(forest, np.array(accepted, dtype=np.int64))
            )
        assert calibration(conditionals)[1] == pytest.approx(len(accepted), abs=0.02)


@given(seed=SEEDS, sizes=SIZES, conditionals=PROBS, exponent=st.sampled_from([0.6, 1.0]))
@settings(deadline=None)
def test_calibrated_trees_stay_trees(seed, sizes, conditionals, exponent):
    rng = np.random.default_rng(seed)
    forest = random_forest(seed, sizes, conditionals)
    calibration = Calibration(exponent)
    calibration.trials = rng.integers(0, 50, calibration.trials.shape).astype(float)
    calibration.hits = np.floor(
        calibration.trials * rng.choice([0.0, 0.3, 1.0], calibration.trials.shape)
    )
    moved = shifted(
        calibration(Conditionals.of(forest)), rng.normal(0, 3, len(sizes))[forest.tree_of]
    )
    path_probs = path_products(forest, moved)
    for tree in with_probs(forest, path_probs):
        tree.check()
    assert ((path_probs == 0.0) >= (forest.path_probs == 0.0)).all()
    assert (path_probs[forest.starts] == 1.0).all() and ROOT not in forest.canonical(path_probs)
