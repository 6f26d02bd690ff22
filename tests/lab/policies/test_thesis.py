"""The thesis' policies, in one scenario or two."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.lab.policies.thesis import CappedThesisSLOPolicy, ThesisPolicy, ThesisSLOPolicy
from tests.support.policy_costs import begun, costs, late, plan_of, requests_of, selected, sizes
from tests.support.toys.trees import chain, fan


def test_thesis_gives_the_budget_to_the_better_drafts():
    trees = [chain(0.3, 0.3, 0.3), chain(0.9, 0.9, 0.9)]
    policy = ThesisPolicy(SLOSpecConfig(token_budget=5), costs(0.02))
    assert sizes(policy, requests_of(2), trees) == [1, 4]
    bounded = ThesisPolicy(
        SLOSpecConfig(policy="thesis", token_budget=5, max_tree_nodes=3), costs(0.02)
    )
    assert sizes(bounded, requests_of(2), trees) == [2, 3]
    assert plan_of(policy, requests_of(5)).depth == 0  # the roots are the budget


def levels_of(plan, *levels):
    """Return which requests go on after each level, of all requests."""
    assert plan.goes_on is not None
    return [plan.goes_on(np.array(level), np.arange(len(level))).tolist() for level in levels]


def test_thesis_drafts_on_for_trees_whose_last_level_is_among_the_best():
    plan = plan_of(
        ThesisPolicy(SLOSpecConfig(token_budget=6), costs(0.02)), requests_of(2)
    )  # four nodes and two roots
    first, second = (
        [[0.5, 0.1], [0.9, 0.2]],
        [[0.05, 0.0], [0.8, 0.7]],
    )  # two of these replace those of 0.1 and 0.2
    third = [[0.05, 0.0], [0.5, 0.1]]  # ties replace nothing
    assert levels_of(plan, first, second, third) == [[True, True], [False, True], [False, False]]


def test_thesis_slo_spends_no_more_than_one_tree_can_take():
    """S >= N - n + 1: with trees of 1 + 3 nodes and two requests, N is at most 5."""
    policy = ThesisSLOPolicy(SLOSpecConfig(token_budget=64, max_depth=3, max_width=1), costs(0.02))
    trees = [chain(0.9, 0.9, 0.9), chain(0.8, 0.8, 0.8)]
    assert sizes(policy, [late(index, 9.0) for index in range(2)], trees) == [3, 2]


@pytest.mark.parametrize("kind", [ThesisSLOPolicy, CappedThesisSLOPolicy])
def test_thesis_slo_serves_the_late_and_capped_leaves_something_for_others(kind):
    trees = [fan(0.2, 0.2, 0.2, 0.2, 0.2, 0.2), chain(0.9, 0.9, 0.9)]
    config = SLOSpecConfig(policy="thesis-slo-capped", token_budget=8, max_slo_share=0.5)
    policy = kind(config, costs(0.02))
    relaxed = [late(i, 9.0) for i in range(2)]
    hopeless = [late(0, 1e-3), late(1, 9.0)]
    assert sizes(policy, relaxed, trees) == [4, 4]
    assert sizes(policy, hopeless, trees) == ([4, 4] if kind is CappedThesisSLOPolicy else [7, 1])


def test_thesis_slo_predicts_a_step_by_the_last_twenty():
    policy = ThesisSLOPolicy(SLOSpecConfig(token_budget=8), costs(0.02))
    [request] = requests_of(1)
    for seconds in (9.0, *[2.0] * 20):
        step, plan = begun(policy, [request])
        step.select([chain(0.5)], plan)
        step.observe([[]], PhaseTimes(verify_s=seconds))
    assert selected(policy, [request], [chain(0.5)]).step_s == pytest.approx(2.0)
