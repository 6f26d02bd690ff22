"""Calibrated conditionals: true frequencies, connected trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.algo.accept import accept
from hf_slospec.algo.calibration import Calibration, conditionals_of
from hf_slospec.algo.tree import TokenTree
from tests.toys import random_tree


def two_children(first: float, second: float) -> TokenTree:
    return TokenTree(np.array([0, 1, 2]), np.array([-1, 0, 0]), np.array([0, 1, 1]), np.array([1.0, first, second]))


def test_conditionals_and_favourites() -> None:
    path_probs = np.array([1.0, 0.5, 0.4, 0.25, 0.0, 0.0])
    tree = TokenTree(np.arange(6), np.array([-1, 0, 0, 1, 1, 4]), np.array([0, 1, 1, 2, 2, 3]), path_probs)
    conditionals, is_first = conditionals_of(tree)
    assert conditionals.tolist() == [0.5, 0.4, 0.5, 0.0, 0.0]
    assert is_first.tolist() == [True, False, True, False, True]


def test_without_observations_nothing_changes() -> None:
    tree = two_children(0.5, 0.3)
    np.testing.assert_allclose(Calibration()(tree).path_probs, tree.path_probs)


def test_greedy_targets_are_believed_to_take_favourites_more_often() -> None:
    calibrated = Calibration(favourite_exponent=0.5)(two_children(0.25, 0.2))
    np.testing.assert_allclose(calibrated.path_probs, [1.0, 0.5, 0.2])


@pytest.mark.parametrize(("says", "is_true"), [((0.5, 0.3), (0.8, 0.1)), ((0.9, 0.05), (0.2, 0.4))])
def test_converges_to_true_frequencies(says: tuple[float, float], is_true: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    calibration, tree = Calibration(), two_children(*says)
    for _ in range(3000):
        token = int(rng.choice(3, p=[1 - sum(is_true), *is_true]))
        calibration.observe(tree, accept(tree, lambda node, token=token: token, lambda _: False)[:1])
    np.testing.assert_allclose(calibration(tree).path_probs[1:], is_true, atol=0.04)
    assert calibration.trials.max() <= Calibration.MEMORY + 1


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_calibrated_trees_stay_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration()
    calibration.trials = rng.integers(0, 50, calibration.trials.shape).astype(float)
    calibration.hits = np.floor(calibration.trials * rng.random(calibration.trials.shape))
    tree = random_tree(rng, 20)
    calibrated = calibration(tree)
    calibrated.check()
    assert ((calibrated.path_probs == 0.0) >= (tree.path_probs == 0.0)).all()
