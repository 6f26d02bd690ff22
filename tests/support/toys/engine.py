"""Engines over the toy model: policies by name, steps to the end, plain decoding beside them."""

from __future__ import annotations

from dataclasses import replace

from hf_slospec.engine.events import PhaseTimes
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.request import Request
from tests.support.toys.models import (
    new_costs,
)


def policy_of(config, experience=None):
    return new_policy(config, new_costs(), experience or SpeculationHistory(config))


def decode_plainly(choose, request):
    """All tokens of the request when it is decoded alone, one token at a time."""
    alone = Request(request.index, replace(request.params, prompt=request.tokens))
    while not alone.emit(choose(alone)):
        pass
    return alone.tokens


def run(engine):
    events = []
    while engine.scheduler.running:
        engine.clock.now_s += 1.0
        events.append(engine.step())
    return events


def commit(request, tokens, now_s):
    for token in tokens:
        request.emit(token)
    request.record_step(0, 0, 1.0, PhaseTimes(), now_s)
