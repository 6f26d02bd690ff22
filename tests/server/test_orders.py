"""What fields of a request's body mean to the batcher."""

from __future__ import annotations

import pytest

from hf_slospec import InvalidInputError, SLOStage
from hf_slospec.server.access import Tenant
from hf_slospec.server.bodies import CompletionBody
from hf_slospec.server.limits import RequestLimits
from hf_slospec.server.options import Objective, SLOLimits


def test_a_keys_limits_hold_for_what_an_objective_gives():
    objective = Objective(slo_e2e=4.0, priority=-2)
    body = CompletionBody(prompt="x")
    for limits, words in (
        (SLOLimits(lowest_priority=0), "priority must be at least 0"),
        (SLOLimits(strictest_e2e=5.0), "slo_e2e must be at least 5 s"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            Tenant(limits, "", b"").arguments(body, {}, objective)
    found = Tenant(SLOLimits(default_tpot=9.0), "", b"").arguments(body, {}, objective)
    assert (found["slo_tpot"], found["slo_e2e"], found["priority"]) == (9.0, 4.0, -2)


def test_a_keys_limits_hold_for_every_stage():
    stages = [{"slo_tpot": 0.2, "until": "</think>"}, {"slo_tpot": 0.5, "slo_ttft": 0.4}]
    body = CompletionBody.model_validate({"prompt": "x", "slo_tpot": stages})
    found = Tenant(SLOLimits(strictest_tpot=0.2, strictest_ttft=0.4), "", b"").arguments(
        body, {}, Objective()
    )
    assert found["slo_tpot"] == body.stages == [SLOStage(**stage) for stage in stages]
    for limits, named in (
        (SLOLimits(strictest_tpot=0.3), "slo_tpot"),
        (SLOLimits(strictest_ttft=1), "slo_ttft"),
    ):
        with pytest.raises(InvalidInputError, match=f"{named} must be at least"):
            Tenant(limits, "", b"").arguments(body, {}, Objective())
    for limits in (RequestLimits(stop_chars=7), RequestLimits(stop_strings=1)):
        with pytest.raises(InvalidInputError, match="slo_tpot"):
            limits.check_body(body, 100)
