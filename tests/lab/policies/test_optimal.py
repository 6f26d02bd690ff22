"""Policy ``optimal``: AdaServe's Algorithm 1 on the draft's probabilities."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec import SLOSpecConfig
from hf_slospec.lab.policies.optimal import OptimalPolicy
from hf_slospec.policies.adaserve import AdaServePolicy
from tests.support.breadth import quick_or
from tests.support.policy_costs import costs, late, plan_of, requests_of, selected, sizes
from tests.support.toys.trees import SEEDS, chain, random_tree


def test_candidate_trees_are_as_wide_and_deep_as_the_config_and_the_budget_allow():
    policy = OptimalPolicy(SLOSpecConfig(token_budget=6, max_depth=5, max_width=3), costs(0.02))
    assert [(plan.depth, plan.width) for plan in (plan_of(policy, requests_of(n)) for n in (1, 4, 5, 6))] == [
        (5, 3), (2, 2), (1, 1), (0, 3)
    ]  # fmt: skip


def test_late_requests_get_the_fewest_nodes_that_they_require():
    policy = OptimalPolicy(
        SLOSpecConfig(token_budget=6), costs(0.0, level_s=0.0)
    )  # a step takes 1 s
    requests = [late(0, 1.25), late(1, None)]  # (1 + 1) / 1.25 - 1 = 0.6, and no requirement
    trees = [chain(0.5, 0.5, 0.5), chain(0.9, 0.9, 0.9, 0.9)]
    assert sizes(policy, requests, trees) == [1, 5]
    requests[0] = late(0, 0.8)  # requires 1.5
    assert sizes(policy, requests, trees) == [2, 4]
    requests[0] = late(0, 1e-3)  # requires more than its tree holds
    assert sizes(policy, requests, trees) == [4, 2]


@given(seed=SEEDS, budget=st.integers(3, 16), pace_s=st.sampled_from([0.3, 0.8, 1.2, 2.0]))
@settings(deadline=None, max_examples=quick_or(33, 100))
def test_no_selection_of_adaserve_expects_more(seed, budget, pace_s):
    """Of the same trees, if both meet what is required."""
    rng = np.random.default_rng(seed)
    config = SLOSpecConfig(token_budget=budget)
    trees, requests = (
        [random_tree(rng, 8) for _ in range(3)],
        [late(0, pace_s), late(1, 4.0), late(2, None)],
    )
    optimal, adaserve = (
        selected(kind(config, costs(0.0, 0.0)), requests, trees, 1.0)
        for kind in (OptimalPolicy, AdaServePolicy)
    )
    required = min(2.0 / pace_s - 1.0, trees[0].path_probs.sum())
    if adaserve.expected[0] >= required - 1e-9:
        assert sum(optimal.expected) >= sum(adaserve.expected) - 1e-9
