"""AdaServe's policy on the toy model: late requests first."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.interfaces import Plan
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.policy_costs import begun
from tests.support.toys.engine import commit
from tests.support.toys.models import (
    VOCAB,
    ToyDrafter,
    new_costs,
)
from tests.support.toys.trees import markov_model


@pytest.mark.parametrize(("required", "expected"), [(0.95, [2, 1]), (1.05, [1, 2])])
def test_required_tokens_count_from_the_first_token_to_the_end_of_the_step(required, expected):
    """Ties and the one node to give favour the first request, unless the second needs more than its
    root.
    """
    model = markov_model(np.random.default_rng(6), VOCAB)
    plan = Plan(1, 2)
    requests = [
        Request(0, RequestParams([0, 1], 30)),
        Request(1, RequestParams([0, 1], 30, (Stage(1.0),))),
    ]
    for request in requests:
        commit(request, [2], 100.0)
        commit(request, [3, 2, 0, 1], 101.0)
    costs = new_costs()
    num_keys = sum(len(request.tokens) for request in requests)
    step_s = float(
        costs.draft_s(2, plan.depth, plan.width, num_keys) + costs.verify_s(3, 2, num_keys)
    )
    policy = AdaServePolicy(SLOSpecConfig(token_budget=3), costs)
    step, _ = begun(policy, requests, 100.0 + (4.0 + required) - step_s)
    selection = step.select(ToyDrafter(model).draft(requests, plan), plan)
    assert [tree.num_nodes for tree in selection.trees] == expected
    assert selection.step_s == pytest.approx(step_s)
