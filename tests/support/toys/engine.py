"""Engines over the toy model: policies by name, steps to the end, plain decoding beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.engine.interfaces import Policy
from hf_slospec.engine.step import Engine
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.request import Request
from tests.support.toys.models import (
    Choose,
    new_costs,
)


def policy_of(config: SLOSpecConfig, experience: SpeculationHistory | None = None) -> Policy:
    return new_policy(config, new_costs(), experience or SpeculationHistory(config))


def decode_plainly(choose: Choose, request: Request) -> list[int]:
    """All tokens of the request when it is decoded alone, one token at a time."""
    alone = Request(request.index, replace(request.params, prompt=request.tokens))
    while not alone.emit(choose(alone)):
        pass
    return alone.tokens


def run(engine: Engine) -> list[StepEvent]:
    events = []
    while engine.scheduler.running:
        engine.clock.now_s += 1.0
        events.append(engine.step())
    return events


def commit(request: Request, tokens: Sequence[int], now_s: float) -> None:
    for token in tokens:
        request.emit(token)
    request.record_step(0, 0, 1.0, PhaseTimes(), now_s)
