"""Simulation of a load: the real engine, scheduler and policy on simulated models and a virtual clock."""

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
from hf_slospec.sim.workload import MAX_TIME_S, Job

MAX_REPLICAS = 1000


@dataclass
class _RoutedRequest:
    """A request with the replica that serves it."""

    request: Request
    job: Job
    replica: int = 0
    reroutes: int = 0
    decode_begun_s: float | None = None

    def outcome(self) -> Outcome:
        """Return the result; a request that was never decoded ended with its prefill."""
        begun_s = self.request.last_token_s if self.decode_begun_s is None else self.decode_begun_s
        return Outcome.of(self.request, self.job, self.replica, begun_s, self.reroutes)


class Replica:
    """One engine with its own hardware and clock."""

    def __init__(
        self,
        config: SLOSpecConfig,
        hardware: Hardware,
        library: Library,
        seed: int,
        oracle: bool,
        make_policy: NewPolicy | None,
    ):
        self.clock, costs = VirtualClock(), hardware.costs()
        max_nodes = max_nodes_per_request(config, make_policy)
        limits = limits_of(config, config.kv_tokens or hardware.kv_tokens, max_nodes)
        policy: Policy
        if oracle:
            policy = OraclePolicy(library, config, hardware, seed)
        else:  # tokens are ranks, so every id is known
            policy = new_policy(config, costs, SpeculationHistory(config), make_policy, sys.maxsize)
        target = SimulatedTarget(library, hardware, self.clock)
        drafter = SimulatedDrafter(library, hardware, self.clock, seed)
        self.engine = continuous_engine(config, Parts(target, drafter, policy, costs, self.clock), limits)
        self.scheduler = self.engine.scheduler

    @property
    def is_busy(self) -> bool:
        """Return whether it has unfinished requests."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request, now_s: float) -> None:
        """Add a request at a time of the virtual clock."""
        if not self.is_busy:
            self.clock.now_s = max(self.clock.now_s, now_s)
        self.scheduler.add(request)

    def step(self) -> StepEvent:
        """Run one engine step, which must advance the clock."""
        before_s = self.clock.now_s
        event = self.engine.step()
        assert self.clock.now_s > before_s, "the step was empty, so the clock did not advance"
        return event


class Simulation:
    """A load served by one or several replicas of a system; deterministic for a given seed.

    Args:
        library: the texts of the requests, in their order.
        max_reroutes: how often a request may be passed to the next replica because its SLOs are not guaranteed; None:
            until all replicas have seen it.
        oracle: use the oracle policy in place of the config's policy.
        make_policy: makes a custom policy in place of the config's; its plans are limited by the config's
            ``max_depth`` and ``max_width``.

    Raises:
        InvalidInputError: an argument is out of its range, or the arguments do not fit together.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        library: Library,
        hardware: Hardware,
        config: SLOSpecConfig,
        *,
        replicas: int = 1,
        max_reroutes: int | None = None,
        seed: int = 0,
        oracle: bool = False,
        make_policy: NewPolicy | None = None,
    ):
        if not jobs:
            raise InvalidInputError("the load contains no requests")
        if oracle and make_policy is not None:
            raise InvalidInputError("oracle and make_policy exclude each other; give one of them")
        if not 1 <= replicas <= MAX_REPLICAS:
            raise InvalidInputError(f"replicas must be within 1..{MAX_REPLICAS}, got {replicas}")
        if len(library.lengths) != len(jobs):
            raise InvalidInputError(
                f"every request needs a text, got {len(jobs)} requests, {len(library.lengths)} texts"
            )
        if config.policy not in ("none", "auto") and config.max_width > library.num_children:
            raise InvalidInputError(
                f"max_width is {config.max_width}, but the texts have only {library.num_children} children per place"
            )
        if not all(0.0 <= job.arrival_s <= MAX_TIME_S for job in jobs):
            raise InvalidInputError(f"requests must arrive within 0..{MAX_TIME_S:g} seconds")
        self.replicas = [
            Replica(config, hardware, library, seed + index, oracle, make_policy) for index in range(replicas)
        ]
        self.max_reroutes = replicas - 1 if max_reroutes is None else min(max_reroutes, replicas - 1)
        limits = self.replicas[0].scheduler.limits
        for index, job in enumerate(jobs):  # before the token lists are allocated
            needed = job.input_tokens + job.max_output_tokens + limits.max_nodes
            if needed > limits.kv_tokens:
                raise InvalidInputError(
                    f"request {index} needs {needed} tokens of K/V cache ({job.input_tokens} for its prompt, "
                    f"{job.max_output_tokens} for its output, {limits.max_nodes} for its draft tree), "
                    f"but the hardware has {limits.kv_tokens}"
                )
        self._requests = [_RoutedRequest(_request(index, job), job) for index, job in enumerate(jobs)]
        self._next_replica = 0

    def run(self, system: str = "", on_end: Callable[[], object] = lambda: None) -> Run:
        """Serve the whole load.

        Args:
            system: the name of the result.
            on_end: called after each finished request.
        """
        arrivals = [(routed.job.arrival_s, routed.request.index) for routed in self._requests]
        heapq.heapify(arrivals)
        totals, num_left = Totals(), len(arrivals)
        while num_left:
            busy = [replica for replica in self.replicas if replica.is_busy]
            now_s = min((replica.clock.now_s for replica in busy), default=math.inf)
            if arrivals and arrivals[0][0] <= now_s:
                arrival_s, index = heapq.heappop(arrivals)
                self._arrive(self._requests[index], arrival_s)
                continue
            replica = min(busy, key=lambda replica: replica.clock.now_s)
            if self.max_reroutes:
                self._reroute(replica)
                if not replica.is_busy:
                    continue
            event = replica.step()
            self._raise_errors(event)
            _add_step(totals, event)
            for part in event.decoding:
                routed = self._requests[part.index]
                if routed.decode_begun_s is None:
                    routed.decode_begun_s = event.begun_s
            num_ended = sum(self._requests[part.index].request.is_finished for part in event.requests)
            num_left -= num_ended
            for _ in range(num_ended):
                on_end()
        outcomes = tuple(routed.outcome() for routed in self._requests)
        return Run(system, outcomes, totals, sum(_is_not_guaranteed(routed.request) for routed in self._requests))

    def _raise_errors(self, event: StepEvent) -> None:
        """Raise the error of a request; the engine records it, but in a simulation it can only be an interrupt."""
        for part in event.requests:
            if (error := self._requests[part.index].request.error) is not None:
                raise error

    def _arrive(self, routed: _RoutedRequest, now_s: float) -> None:
        """Assign a request to the next replica, round robin (SLOs-Serve, section 4)."""
        self._assign(routed, self._next_replica, now_s)
        self._next_replica = (self._next_replica + 1) % len(self.replicas)

    def _assign(self, routed: _RoutedRequest, replica: int, now_s: float) -> None:
        routed.replica = replica
        self.replicas[replica].add(routed.request, now_s)

    def _reroute(self, replica: Replica) -> None:
        """Pass requests without guarantee and without progress to the next replica, up to ``max_reroutes`` times."""
        replica.scheduler.decide_guarantees(replica.clock.now_s)
        for request in (*replica.scheduler.waiting, *replica.scheduler.running):
            routed = self._requests[request.index]
            if _is_not_guaranteed(request) and not request.num_cached and routed.reroutes < self.max_reroutes:
                replica.engine.retire([request])
                request.is_best_effort = False  # the next replica decides anew
                routed.reroutes += 1
                self._assign(routed, (routed.replica + 1) % len(self.replicas), replica.clock.now_s)


def _is_not_guaranteed(request: Request) -> bool:
    return request.has_slo and not request.is_guaranteed


def _request(index: int, job: Job) -> Request:
    end = job.input_tokens + job.output_tokens
    return Request(
        index,
        [0] * job.input_tokens,
        job.max_output_tokens,
        (Stage(job.tpot_slo_s),),
        is_stop=lambda tokens: len(tokens) >= end,
        arrived_s=job.arrival_s,
        is_sampled=job.is_sampled,
        ttft_slo_s=job.ttft_slo_s,
        priority=job.priority,
    )


def _add_step(totals: Totals, event: StepEvent) -> None:
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
