"""Replays a load through the real engine, scheduler and policy, on simulated models and a virtual clock."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_slospec.assembly import Parts, continuous_engine, limits_of
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Policy
from hf_slospec.engine.request import Request, Stage
from hf_slospec.errors import InvalidInputError
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.sim.hardware import Hardware
from hf_slospec.sim.models import SimulatedDrafter, SimulatedTarget, VirtualClock
from hf_slospec.sim.oracle import OraclePolicy
from hf_slospec.sim.outcomes import Outcome, Run, Totals
from hf_slospec.sim.texts import Library
from hf_slospec.sim.workload import MOST_S, Job

MOST_REPLICAS = 1000


@dataclass
class _Visit:
    """A request on its way through the replicas."""

    request: Request
    job: Job
    replica: int = 0
    hops: int = 0
    decode_begun_s: float = math.nan


class Replica:
    """One engine with hardware and a clock of its own."""

    def __init__(
        self,
        config: SLOSpecConfig,
        hardware: Hardware,
        library: Library,
        seed: int,
        hindsight: bool,
        make_policy: NewPolicy | None,
    ):
        self.clock, costs = VirtualClock(), hardware.costs()
        max_nodes = max_nodes_per_request(config, make_policy)
        limits = limits_of(config, config.kv_tokens or hardware.kv_tokens, max_nodes)
        policy: Policy
        if hindsight:
            policy = OraclePolicy(library, config, hardware, seed)
        else:  # tokens are ranks, so every id is known
            policy = new_policy(config, costs, SpeculationHistory(config), make_policy, sys.maxsize)
        target = SimulatedTarget(library, hardware, self.clock)
        drafter = SimulatedDrafter(library, hardware, self.clock, seed)
        self.engine = continuous_engine(config, Parts(target, drafter, policy, costs, self.clock), limits)
        self.scheduler = self.engine.scheduler

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request, now_s: float) -> None:
        if not self.is_busy:
            self.clock.now_s = max(self.clock.now_s, now_s)
        self.scheduler.add(request)

    def step(self) -> StepEvent:
        before_s = self.clock.now_s
        event = self.engine.step()
        assert self.clock.now_s > before_s, "the scheduler let a step pass with nothing in it"
        return event


class Simulation:
    """A load on one or several replicas of a system; all of it follows from the seed."""

    def __init__(
        self,
        jobs: Sequence[Job],
        library: Library,
        hardware: Hardware,
        config: SLOSpecConfig,
        *,
        replicas: int = 1,
        max_hops: int | None = None,
        seed: int = 0,
        hindsight: bool = False,
        make_policy: NewPolicy | None = None,
    ):
        """``max_hops``: how often a request that a replica promises nothing goes to the next; None: to all of them.

        With ``hindsight`` an oracle takes the place of the config's policy; with ``make_policy`` one of your own, which
        bounds its plans by the config's ``max_depth`` and ``max_width``.

        Raises:
            InvalidInputError: something of this is impossible.
        """
        if not jobs:
            raise InvalidInputError("the load holds no requests")
        if hindsight and make_policy is not None:
            raise InvalidInputError("hindsight and make_policy are two policies; give one of them")
        if not 1 <= replicas <= MOST_REPLICAS:
            raise InvalidInputError(f"replicas must lie within 1..{MOST_REPLICAS}, got {replicas}")
        if len(library.lengths) != len(jobs):
            raise InvalidInputError(f"there are {len(jobs)} requests and {len(library.lengths)} texts")
        if config.policy not in ("none", "auto") and config.max_width > library.num_children:
            raise InvalidInputError(
                f"max_width is {config.max_width}, and the texts hold {library.num_children} children of each place"
            )
        if not all(0.0 <= job.arrival_s <= MOST_S for job in jobs):
            raise InvalidInputError(f"requests must come within 0..{MOST_S:g} seconds")
        self.replicas = [
            Replica(config, hardware, library, seed + place, hindsight, make_policy) for place in range(replicas)
        ]
        self.max_hops = replicas - 1 if max_hops is None else min(max_hops, replicas - 1)
        limits = self.replicas[0].scheduler.limits
        for index, job in enumerate(jobs):  # before requests of any size are made
            needed = job.input_tokens + job.most_tokens + limits.max_nodes
            if needed > limits.kv_tokens:
                raise InvalidInputError(
                    f"request {index} needs {needed} tokens of K/V ({job.input_tokens} for its prompt, "
                    f"{job.most_tokens} for its output, {limits.max_nodes} for its token tree), "
                    f"and there are {limits.kv_tokens}"
                )
        self._visits = [_Visit(_request(index, job), job) for index, job in enumerate(jobs)]
        self._next_replica = 0

    def run(self, system: str = "", on_end: Callable[[], object] = lambda: None) -> Run:
        """Serve the whole load; ``on_end`` is called after each request."""
        arrivals = [(visit.job.arrival_s, visit.request.index) for visit in self._visits]
        heapq.heapify(arrivals)
        totals, num_left = Totals(), len(arrivals)
        while num_left:
            busy = [replica for replica in self.replicas if replica.is_busy]
            now_s = min((replica.clock.now_s for replica in busy), default=math.inf)
            if arrivals and arrivals[0][0] <= now_s:
                arrival_s, index = heapq.heappop(arrivals)
                self._arrive(self._visits[index], arrival_s)
                continue
            replica = min(busy, key=lambda replica: replica.clock.now_s)
            if self.max_hops:
                self._hand_on(replica)
                if not replica.is_busy:
                    continue
            event = replica.step()
            self._check(event)
            _book(totals, event)
            for part in event.decoding:
                visit = self._visits[part.index]
                if math.isnan(visit.decode_begun_s):
                    visit.decode_begun_s = event.begun_s
            num_ended = sum(self._visits[part.index].request.is_finished for part in event.requests)
            num_left -= num_ended
            for _ in range(num_ended):
                on_end()
        outcomes = tuple(
            Outcome.of(v.request, v.job, v.replica, _or(v.decode_begun_s, v.request.last_token_s), v.hops)
            for v in self._visits
        )
        declined = sum(v.request.has_slo and not v.request.is_guaranteed for v in self._visits)
        return Run(system, outcomes, totals, declined)

    def _check(self, event: StepEvent) -> None:
        """The engine ends a request whose choice of tokens raised, but here nothing may: it was an interrupt."""
        for part in event.requests:
            if (error := self._visits[part.index].request.error) is not None:
                raise error

    def _arrive(self, visit: _Visit, now_s: float) -> None:
        """By turns to the replicas (SLOs-Serve, section 4)."""
        self._put(visit, self._next_replica, now_s)
        self._next_replica = (self._next_replica + 1) % len(self.replicas)

    def _put(self, visit: _Visit, replica: int, now_s: float) -> None:
        visit.replica = replica
        self.replicas[replica].add(visit.request, now_s)

    def _hand_on(self, replica: Replica) -> None:
        """Requests that a replica promises nothing go on to the next before they begin, up to ``max_hops`` times."""
        replica.scheduler.decide_guarantees(replica.clock.now_s)
        for request in (*replica.scheduler.waiting, *replica.scheduler.running):
            visit, is_declined = self._visits[request.index], request.has_slo and not request.is_guaranteed
            if is_declined and not request.num_cached and visit.hops < self.max_hops:
                replica.engine.retire([request])
                request.is_best_effort = False  # that is for the next one to say
                visit.hops += 1
                self._put(visit, (visit.replica + 1) % len(self.replicas), replica.clock.now_s)


def _request(index: int, job: Job) -> Request:
    end = job.input_tokens + job.output_tokens
    return Request(
        index,
        [0] * job.input_tokens,
        job.most_tokens,
        (Stage(job.tpot_s),),
        is_stop=lambda tokens: len(tokens) >= end,
        arrived_s=job.arrival_s,
        is_sampled=job.is_sampled,
        ttft_slo_s=job.ttft_s,
        priority=job.priority,
    )


def _book(totals: Totals, event: StepEvent) -> None:
    if event.is_prefill:
        totals.num_prefills += 1
        totals.prefill_s += event.phases.total_s
        return
    totals.phases += event.phases
    totals.num_steps += 1
    totals.requests += event.num_decoding
    totals.depth += event.depth
    totals.nodes += sum(part.nodes for part in event.decoding)
    totals.committed += sum(part.committed for part in event.decoding)
    totals.expected += sum(part.expected for part in event.decoding)


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value
