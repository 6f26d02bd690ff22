"""Costs and requests for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Policy, Selection
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.request.request import Request, RequestParams, Stage
from hf_slospec.tree.tree import TokenTree

NO_TIME = PhaseTimes()
EIGHT = SLOSpecConfig(max_depth=8)


def costs(token_s: float, level_s: float = 0.05) -> StepCosts:
    return StepCosts(
        ForwardCost(LatencyCurve((1, 1000), (1.0, 1.0 + 999.0 * token_s))),
        ForwardCost(LatencyCurve((1,), (level_s,))),
    )


def requests_of(number: int) -> list[Request]:
    return [Request(index, RequestParams([1, 2, 3], 100)) for index in range(number)]


def late(index: int, tpot_slo_s: float | None, elapsed_s: float = 1.0, emitted: int = 1) -> Request:
    """One that has emitted so many tokens since the first at 0 s."""
    request = Request(index, RequestParams([1, 2, 3], 100, (Stage(tpot_slo_s),)))
    for now_s, number in ((0.0, 1), (elapsed_s, emitted)):
        for _ in range(number):
            request.emit(5)
        request.record_step(0, 0, 1.0, NO_TIME, now_s)
    return request


class Begun:
    """A step of a policy after its plan."""

    def __init__(self, policy: Policy, requests: Sequence[Request]):
        self.policy = policy
        self.requests = requests

    def select(self, candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        self.plan = plan
        if plan.decoding is not None:
            self.requests = plan.decoding
        return self.policy.select(self.requests, candidates, plan)

    def observe(self, accepted: Sequence[Sequence[int]], phases: PhaseTimes = NO_TIME) -> None:
        self.policy.observe(self.requests, accepted, phases, self.plan)


def begun(
    policy: Policy, requests: Sequence[Request], now_s: float = 0.0, num_prefill_tokens: int = 0
) -> tuple[Begun, Plan]:
    """Begin a step of the policy; return the rest of it and its plan."""
    plan = policy.plan(requests, now_s, num_prefill_tokens)
    return Begun(policy, requests), plan


def plan_of(policy: Policy, requests: Sequence[Request], now_s: float = 0.0) -> Plan:
    """Return the plan of a step that ends there."""
    return begun(policy, requests, now_s)[1]


def selected(
    policy: Policy, requests: Sequence[Request], trees: Sequence[TokenTree], now_s: float = 0.0
) -> Selection:
    """Return the selection of a step in which the plan is kept."""
    step, plan = begun(policy, requests, now_s)
    return step.select(trees, plan)


def sizes(
    policy: Policy, requests: Sequence[Request], trees: Sequence[TokenTree], now_s: float = 1.0
) -> list[int]:
    return [tree.num_nodes for tree in selected(policy, requests, trees, now_s).trees]
