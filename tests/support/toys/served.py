"""An engine under continuous batching on the toy model and a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.interfaces import Plan
from hf_slospec.engine.step import Engine
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from tests.support.toys.models import (
    VOCAB,
    Clock,
    ToyDrafter,
    ToyTarget,
    WholeTrees,
    greedy,
    new_costs,
)
from tests.support.toys.trees import markov_model

ROOMY = Limits(max_batch=8, kv_tokens=10**6, max_nodes=4, prefill_chunk=8, starvation_s=1e9)


class Served:
    """An engine under continuous batching, whose steps take the time that is expected of them."""

    def __init__(self, admission="slo", policy=None, seed=0, **limits):
        """Make an engine without requests; ``limits`` change those of ROOMY."""
        self.clock = Clock()
        self.target_model = markov_model(np.random.default_rng(seed), VOCAB)
        self.toy, self.drafter = ToyTarget(greedy(self.target_model)), ToyDrafter(self.target_model)
        costs = new_costs()
        self.scheduler = ContinuousScheduler(replace(ROOMY, **limits), costs, admission)
        policy = policy or WholeTrees(Plan(0, 1))
        self.engine = Engine(
            self.toy, self.drafter, policy, self.scheduler, costs, self.clock, check_invariants=True
        )
        self.events = list[StepEvent]()

    def add(self, index=0, prompt=3, new=5, **fields):
        tpot_slo_s = fields.pop("tpot_slo_s", None)
        params = RequestParams(([0, 1] * prompt)[:prompt], new, (Stage(tpot_slo_s),), **fields)
        request = Request(index, params, self.clock.now_s)
        self.scheduler.add(request)
        return request

    def step(self, number=1):
        """Run some steps; return the event of the last one."""
        for _ in range(number):
            event = self.engine.step()
            num_tokens = sum(request.nodes for request in event.decoding) + event.prefill_tokens
            costs = self.scheduler.costs
            self.clock.now_s += float(
                costs.verify_s(num_tokens, max(event.num_decoding, 1), event.num_keys)
            )
            self.events.append(event)
        return event

    def run(self, most=10_000):
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert len(self.events) < most, "requests do not end"
