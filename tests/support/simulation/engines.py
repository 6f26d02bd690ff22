"""Real engines and batchers on simulated models, under a scheduler that checks what it guarantees."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, cast

from hf_slospec.assembly import EngineParts, new_engine
from hf_slospec.batcher.batcher import Batcher
from hf_slospec.batcher.stats import Telemetry
from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.lookup import PromptLookupDrafter
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.interfaces import Plan as DraftPlan
from hf_slospec.engine.interfaces import Policy
from hf_slospec.generate.speculator import Speculator
from hf_slospec.model.target import PackedTarget
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.request import Request
from hf_slospec.scheduler.batch_formation import MAX_SKIPPED
from hf_slospec.scheduler.continuous import ContinuousScheduler
from tests.support.simulation.models import VOCAB, SimulatedModel, SimulatedSampler
from tests.support.toys.models import NowAndThen, WholeTrees, new_costs


class CheckedScheduler(ContinuousScheduler):
    """Checks what the scheduler guarantees, at every step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.left_out = dict[Request, int]()  # steps in a row
        self.counts = Counter[str]()

    def enter(self, now_s):
        waited = dict.fromkeys(self.waiting)
        starving = [
            request
            for request in waited
            if now_s >= self._waiting_since[request] + self.limits.starvation_s
        ]
        guaranteed = {request for request in (*self.running, *waited) if request.is_guaranteed}
        preempted = super().enter(now_s)
        assert all(request.is_guaranteed for request in guaranteed), "a guarantee was taken back"
        present = [*self.running, *self.waiting]
        assert len(set(present)) == len(present), "a request is held twice"
        assert {*waited} <= {*present}, "a request was lost"
        assert len(self.running) <= self.limits.max_batch
        assert self.kv_held <= self.limits.kv_tokens
        soft = [request for request in self.running if not request.is_guaranteed]
        assert not soft or self._after_step(self.running) <= self.limits.kv_tokens, (
            "slots may run out"
        )
        booked = [request for request in present if request.is_guaranteed]
        if self.admission == "slo":
            assert len(booked) <= self.limits.max_batch, "more is guaranteed than there are places"
            # Texts only: where nodes find no room beside them, they are decoded without drafts.
            assert sum(request.params.max_len for request in booked) <= self.limits.kv_tokens, (
                "K/V is guaranteed twice"
            )
        entered = [request for request in self.running if request in waited]
        left = [request for request in starving if request in self.waiting]
        if left:
            assert all(request in starving for request in entered), (
                "a starving request was overtaken"
            )
        return preempted

    def _make_room(self):
        protected = {*self._protected}
        preempted = super()._make_room()
        self.counts["preempted as slots ran out"] += len(preempted)
        assert not any(request.is_guaranteed for request in preempted), (
            "a guaranteed request was preempted for room"
        )
        if protected.intersection(preempted):
            left = [request for request in self.running if not request.is_guaranteed]
            assert protected.issuperset(left), (
                "a protected request was preempted for room before others"
            )
        return preempted

    def schedule(self, now_s):
        schedule = super().schedule(now_s)
        taking_part = {*schedule.decoding, *(chunk.request for chunk in schedule.chunks)}
        assert taking_part or not self.running, "a step does nothing"
        if self.batches.prefill == "first":  # which leaves all others out as long as prompts come
            return schedule
        most = (
            MAX_SKIPPED + 1
        ) * self.limits.max_batch  # each of them may be left out before one takes part
        for request in self.running:
            self.left_out[request] = (
                0 if request in taking_part else self.left_out.get(request, 0) + 1
            )
            assert self.left_out[request] <= most, f"request {request.index} starves"
        return schedule


class FaultyPolicy(Policy):
    """A policy for which memory may run short."""

    def __init__(self, policy, world):
        self.policy = policy
        self.world = world

    def plan(self, *arguments):
        self.world.at("plan")
        return self.policy.plan(*arguments)

    def select(self, *arguments):
        self.world.at("select")
        return self.policy.select(*arguments)

    def observe(self, *arguments):
        self.world.at("learn")
        self.policy.observe(*arguments)


class Engines:
    """What engines of one simulation have in common: models, lock and settings."""

    def __init__(self, plan, world):
        self.plan = plan
        self.world = world
        self.lock = FairLock()
        self.target = SimulatedModel(world, "target", plan.seconds)
        self.draft = SimulatedModel(world, "draft", [0.01])
        self.config = SLOSpecConfig(
            max_depth=max(plan.depth, 1), max_width=plan.width, check_invariants=True
        )
        self.costs = new_costs()
        self.counts = Counter[str]()
        self.turns = list[
            object
        ]()  # the batchers and calls of `generate` whose steps have ended, in order

    def new_drafter(self, kv_tokens=None, kept=0.0):
        if not self.plan.has_assistant:
            return PromptLookupDrafter()
        return AssistantDrafter(
            self.draft, Room(self.plan.limits.max_nodes, VOCAB, kv_tokens, kept)
        )

    def new_target(self, sampler, kv_tokens=None, kept=0.0):
        return PackedTarget(self.target, self.plan.limits.max_nodes, sampler, kv_tokens, kept)

    def parts(self, target, drafter, costs, _=None):
        kind = NowAndThen if self.plan.policy == "now and then" else WholeTrees
        policy: Any = kind(DraftPlan(self.plan.depth, self.plan.width))
        if self.plan.policy == "auto" and self.plan.depth:
            policy = new_policy(self.config, costs, SpeculationHistory(self.config))
        faulty = FaultyPolicy(policy, self.world)
        return EngineParts(target, drafter, faulty, costs, self.world.clock, self.lock.released)

    def on_step(self, step, user):
        self.turns.append(user)
        self.counts["steps"] += 1
        self.counts["steps that decode"] += step.num_decoding > 0
        self.counts["steps that draft"] += step.draft_levels > 0
        self.counts["draft tokens accepted"] += (
            step.committed - len(step.requests) if step.draft_levels else 0
        )

    def generate(self, requests):
        """Decode requests in the calling thread, as a call of ``generate`` does."""
        target = self.new_target(SimulatedSampler(self.world))
        try:
            Speculator.run(cast(Any, self), requests, target, partial(self.on_step, user=target))
        finally:
            with self.lock:
                target.close()


class Server:
    """One batcher with its engine's parts."""

    def __init__(self, engines):
        self.engines = engines
        self.world = engines.world
        self.telemetry = Telemetry()
        self.ended = list[Request]()
        self.most_running = 0
        self.sampler = SimulatedSampler(engines.world)
        self.batcher = Batcher(self._engine, engines.plan.max_queue, engines.lock, self)

    def _engine(self):
        engines = self.engines
        plan = self.engines.plan
        costs = new_costs()
        engines.counts["starts"] += 1
        target = engines.new_target(self.sampler, plan.limits.kv_tokens, plan.kept)
        drafter = engines.new_drafter(plan.limits.kv_tokens, plan.kept)
        engine = new_engine(engines.config, engines.parts(target, drafter, costs), plan.limits)
        guarantee = 0.95 if plan.admission == "slo" else None
        engine.scheduler = CheckedScheduler(
            plan.limits, costs, plan.admission, plan.prefill, target.num_reusable, guarantee, True
        )
        engine.scheduler.counts = engines.counts
        engine.scheduler.output_tokens = plan.output_tokens
        close = engine.close
        self.engine = engine

        def closed():
            close()
            del self.engine
            self.world.at("close")

        engine.close = closed
        return engine

    def on_step(self, step):
        self.engines.on_step(step, self)
        held = self.engine.target.sequences.num_held + self.engine.target.num_kept
        assert held <= self.engines.plan.limits.kv_tokens, "more slots are held than there are"
        self.most_running = max(self.most_running, len(step.requests))
        self.world.at("on_step")
        self.telemetry.on_step(step)

    def on_end(self, request):
        self.ended.append(request)
        self.world.at("on_end")
        self.telemetry.on_end(request)
