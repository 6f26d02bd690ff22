"""Costs and requests for the tests of policies."""

from __future__ import annotations

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage

NO_TIME = PhaseTimes()
EIGHT = SLOSpecConfig(max_depth=8)


def costs(token_s, level_s=0.05):
    return StepCosts(
        ForwardCost(LatencyCurve((1, 1000), (1.0, 1.0 + 999.0 * token_s))),
        ForwardCost(LatencyCurve((1,), (level_s,))),
    )


def requests_of(number):
    return [Request(index, RequestParams([1, 2, 3], 100)) for index in range(number)]


def late(index, tpot_slo_s, elapsed_s=1.0, emitted=1):
    """One that has emitted so many tokens since the first at 0 s."""
    request = Request(index, RequestParams([1, 2, 3], 100, (Stage(tpot_slo_s),)))
    for now_s, number in ((0.0, 1), (elapsed_s, emitted)):
        for _ in range(number):
            request.emit(5)
        request.record_step(0, 0, 1.0, NO_TIME, now_s)
    return request


class Begun:
    """A step of a policy after its plan."""

    def __init__(self, policy, requests):
        self.policy = policy
        self.requests = requests

    def select(self, candidates, plan):
        self.plan = plan
        if plan.decoding is not None:
            self.requests = plan.decoding
        return self.policy.select(self.requests, candidates, plan)

    def observe(self, accepted, phases=NO_TIME):
        self.policy.observe(self.requests, accepted, phases, self.plan)


def begun(policy, requests, now_s=0.0, num_prefill_tokens=0):
    """Begin a step of the policy; return the rest of it and its plan."""
    plan = policy.plan(requests, now_s, num_prefill_tokens)
    return Begun(policy, requests), plan


def plan_of(policy, requests, now_s=0.0):
    """Return the plan of a step that ends there."""
    return begun(policy, requests, now_s)[1]


def selected(policy, requests, trees, now_s=0.0):
    """Return the selection of a step in which the plan is kept."""
    step, plan = begun(policy, requests, now_s)
    return step.select(trees, plan)


def sizes(policy, requests, trees, now_s=1.0):
    return [tree.num_nodes for tree in selected(policy, requests, trees, now_s).trees]
