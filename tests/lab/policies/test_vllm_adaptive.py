"""vLLM's adaptive verification: its estimator against its formulas, and its choice by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.policies.vllm_adaptive import (
    DAMPING,
    FIT_STEPS,
    INTERCEPT,
    RIDGE,
    SLOPE,
    AcceptanceEstimator,
    VLLMAdaptivePolicy,
    log_odds_of,
)
from hf_slospec.tree.tree import TokenTree
from tests.support.policy_costs import begun, costs, requests_of, sizes
from tests.support.toys.trees import chain

SEVEN = SLOSpecConfig(policy="vllm-adaptive", max_depth=7)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def test_whole_chains_are_drafted_and_as_much_verified_as_pays():
    trees = [chain(*[0.999] * 7), chain(0.3, 0.9, 0.9), chain(*[0.9] * 7)]
    _, plan = begun(VLLMAdaptivePolicy(SEVEN, costs(0.02)), requests_of(3))
    assert (plan.depth, plan.width) == (7, 1)
    cheap, fair, dear = (sizes(VLLMAdaptivePolicy(SEVEN, costs(token_s)), requests_of(3), trees)
                         for token_s in (0.0, 0.2, 9.0))  # fmt: skip
    assert cheap == [8, 4, 8]
    assert fair[0] > fair[2] >= fair[1]
    assert dear == [1, 1, 1]
    assert VLLMAdaptivePolicy.max_nodes(SEVEN) == 7


@pytest.mark.parametrize("token_s", [0.01, 0.1, 0.3])
def test_no_other_lengths_have_more_expected_tokens_per_second(token_s):
    conditionals = [(0.95, 0.9, 0.3), (0.4, 0.99, 0.8), (0.7, 0.2, 0.9)]
    policy = VLLMAdaptivePolicy(SEVEN, costs(token_s))
    step, plan = begun(policy, requests_of(3))
    selection = step.select([chain(*row) for row in conditionals], plan)

    def survival(row):
        odds = [c / (1 - c) for c in row]
        return np.cumprod([sigmoid(SLOPE * np.log(one) + INTERCEPT) for one in odds])

    def tokens(lengths):
        return [1 + survival(row)[:n].sum() for row, n in zip(conditionals, lengths, strict=True)]

    def seconds(lengths):
        return float(policy.costs.shape_s(requests_of(3), 7, 1, 3 + sum(lengths)))

    best = max(itertools.product(range(4), repeat=3), key=lambda it: sum(tokens(it)) / seconds(it))
    assert [tree.max_depth for tree in selection.trees] == list(best)
    assert selection.expected == pytest.approx(tokens(best))
    assert selection.step_s == pytest.approx(seconds(best))


def test_a_fit_is_a_damped_newton_step_of_the_logistic_regression():
    rng = np.random.default_rng(0)
    depth = 3
    estimator = AcceptanceEstimator(depth)
    rows = [(x, k, rng.random() < sigmoid(0.8 * x - 0.3 * k))
            for x, k in zip(rng.normal(1, 2, 700), rng.integers(1, depth + 1, 700), strict=True)]  # fmt: skip
    for part in np.array_split(np.arange(700), FIT_STEPS):
        assert estimator.slope == SLOPE  # nothing changes between fits
        x, k, y = (np.array([rows[i][column] for i in part]) for column in range(3))
        estimator.observe(x, k, y)
    x, k, y = (np.array(column) for column in zip(*rows, strict=True))
    design = np.column_stack([x, *(k == one for one in range(1, depth + 1))]).astype(float)
    p = sigmoid(SLOPE * x + INTERCEPT)
    hessian = design.T @ np.diag(p * (1 - p)) @ design + RIDGE * np.eye(depth + 1)
    gradient = design.T @ (y - p)
    slope_step = np.linalg.solve(hessian, gradient)[0] * 700 / (700 + DAMPING)
    # The intercepts are solved for once more with the damped step of the slope.
    counts = np.array([(k == one).sum() for one in range(1, depth + 1)])
    steps = np.linalg.solve(hessian[1:, 1:], gradient[1:] - hessian[1:, 0] * slope_step)
    assert estimator.slope == pytest.approx(SLOPE + slope_step)
    assert estimator.intercepts[1:] == pytest.approx(
        INTERCEPT + steps * counts / (counts + DAMPING)
    )


def test_fits_find_the_coefficients_that_made_the_outcomes():
    rng = np.random.default_rng(1)
    estimator = AcceptanceEstimator(2)
    depths = np.array([1, 1, 2, 2])
    for _ in range(20 * FIT_STEPS):
        x = rng.normal(0, 2, 4)
        estimator.observe(x, depths, rng.random(4) < sigmoid(1.2 * x + np.array([1, 1, -1, -1])))
    assert estimator.slope == pytest.approx(1.2, abs=0.2)
    assert estimator.intercepts[1:] == pytest.approx([1, -1], abs=0.25)


def test_a_fit_that_would_turn_the_slope_negative_leaves_it():
    estimator = AcceptanceEstimator(1)
    x = np.linspace(-3, 3, 40)
    for _ in range(FIT_STEPS):  # likely tokens are rejected, unlikely ones accepted
        estimator.observe(x, np.ones(40, np.int64), x < 0)
    assert estimator.slope == SLOPE
    assert estimator.intercepts[1] != INTERCEPT


def test_accepted_tokens_and_the_first_rejected_one_count():
    policy = VLLMAdaptivePolicy(SEVEN, costs(0.0))
    trees = [chain(0.9, 0.8, 0.7), chain(0.6, 0.5), TokenTree.root_only(0)]
    step, plan = begun(policy, requests_of(3))
    assert [tree.num_nodes for tree in step.select(trees, plan).trees] == [4, 3, 1]
    step.observe([[1], [1, 2], []])
    counts = policy.estimator._sums[5]  # by depth: two tries at depth 1, two at depth 2
    assert counts.tolist() == [0, 2, 2, 0, 0, 0, 0, 0]
    errors = policy.estimator._sums[4]
    expected = [1 - sigmoid(SLOPE * log_odds_of(np.array(c)) + INTERCEPT) for c in (0.9, 0.6, 0.5)]
    assert errors[1] == pytest.approx(expected[0] + expected[1])
    assert errors[2] == pytest.approx(
        -sigmoid(SLOPE * log_odds_of(np.array(0.8)) + INTERCEPT) + expected[2]
    )


def test_the_estimator_outlives_a_call():
    own = costs(0.02)
    policy = VLLMAdaptivePolicy(SEVEN, own)
    assert VLLMAdaptivePolicy(SEVEN, own).estimator is policy.estimator
    assert VLLMAdaptivePolicy(SEVEN, costs(0.02)).estimator is not policy.estimator
    deeper = SEVEN.model_copy(update=dict(max_depth=9))
    assert VLLMAdaptivePolicy(deeper, own).estimator is not policy.estimator


def test_certain_and_impossible_drafts_have_bounded_log_odds():
    assert log_odds_of(np.array([0.0, 0.5, 1.0])).tolist() == [-40.0, 0.0, 40.0]
    policy = VLLMAdaptivePolicy(SLOSpecConfig(policy="vllm-adaptive", max_depth=0), costs(0.0))
    assert sizes(policy, requests_of(2), [TokenTree.root_only(0)] * 2) == [1, 1]
