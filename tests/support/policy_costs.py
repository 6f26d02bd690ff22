"""Costs and requests for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Policy
from hf_slospec.engine.request import Request, Stage

NO_TIME = PhaseTimes()
EIGHT = SLOSpecConfig(max_depth=8)


def costs(token_s: float, level_s: float = 0.05) -> StepCosts:
    return StepCosts(
        ForwardCost(LatencyCurve((1, 1000), (1.0, 1.0 + 999.0 * token_s))),
        ForwardCost(LatencyCurve((1,), (level_s,))),
    )


def requests_of(number: int) -> list[Request]:
    return [Request(index, [1, 2, 3], 100) for index in range(number)]


def late(index: int, tpot_slo_s: float | None, elapsed_s: float = 1.0, emitted: int = 1) -> Request:
    """One that has emitted so many tokens since the first at 0 s."""
    request = Request(index, [1, 2, 3], 100, (Stage(tpot_slo_s),))
    for now_s, number in ((0.0, 1), (elapsed_s, emitted)):
        for _ in range(number):
            request.emit(5)
        request.record_step(0, 0, 1.0, NO_TIME, now_s)
    return request


def sizes(policy: Policy, requests: Sequence[Request], trees: Sequence[TokenTree], now_s: float = 1.0) -> list[int]:
    return [tree.num_nodes for tree in policy.select(requests, trees, policy.plan(requests, now_s)).trees]
