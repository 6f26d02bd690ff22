"""Simulation of a load: the real engine, scheduler and policy on simulated models and a virtual
clock.

The simulated models are in models.py, the loads in workload.py and the texts in texts.py.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_slospec.assembly import EngineParts, limits_of, new_engine
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.engine.checks import NO_CHECKS, Checks
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.interfaces import Drafter, Policy
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.models import (
    AdaServeOraclePolicy,
    OraclePolicy,
    SimulatedDrafter,
    SimulatedTarget,
    VirtualClock,
)
from hf_slospec.lab.outcomes import Outcome, Run, Totals
from hf_slospec.lab.systems import OURS, Arrival, router_of
from hf_slospec.lab.texts import Library
from hf_slospec.lab.workload import MAX_TIME_S, Job
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.load import ReplicaLoad, load_of, need_of

# Makes a drafter from the texts, the latencies, the replica's clock and a seed
NewDrafter = Callable[[Library, Hardware, VirtualClock, int], Drafter]

MAX_REPLICAS = 1000


@dataclass
class _RoutedRequest:
    """A request of the load, and the replica that it was sent to."""

    request: Request
    job: Job
    replica: int = 0
    refused_by: list[int] = field(default_factory=list)  # replicas that did not guarantee its SLOs
    decode_begun_s: float | None = None


class Replica:
    """One simulated engine with its latencies and its virtual clock.

    :meth:`step` simulates a whole step at once. The clock of a busy replica is therefore at the end
    of its current step, while other replicas and arrivals are still at earlier times. Requests that
    arrive during the step are admitted at its end.
    """

    def __init__(
        self,
        config: SLOSpecConfig,
        hardware: Hardware,
        library: Library,
        seed: int,
        oracle: bool,
        make_policy: NewPolicy | None,
        clock: VirtualClock,
        new_drafter: NewDrafter,
        continued: Mapping[int, int],
    ):
        self.clock = clock
        costs = hardware.costs()
        max_nodes = max_nodes_per_request(config, make_policy)
        kv_tokens = hardware.kv_tokens if config.kv_tokens is None else config.kv_tokens
        limits = limits_of(config, kv_tokens, max_nodes)
        policy: Policy
        checks = NO_CHECKS
        if oracle and config.policy == AdaServePolicy.name:
            policy = AdaServeOraclePolicy(library, config, costs)
        elif oracle:
            policy = OraclePolicy(
                library, config, hardware, new_drafter(library, hardware, VirtualClock(), seed)
            )
        else:
            config = config.model_copy(update={"kv_tokens": kv_tokens})
            policy = new_policy(config, costs, SpeculationHistory(config), make_policy)
            # A simulated token id is a rank, not an index into a vocabulary, so any id is valid.
            checks = Checks(max_nodes, sys.maxsize, has_user_policy=make_policy is not None)
        target = SimulatedTarget(library, hardware, self.clock, kv_tokens, continued)
        drafter = new_drafter(library, hardware, self.clock, seed)
        parts = EngineParts(target, drafter, policy, costs, self.clock, checks=checks)
        self.engine = new_engine(config, parts, limits)
        self.scheduler = self.engine.scheduler
        # Loads before and after the latest step, for load()
        self._reported = self._next_report = load_of(self.scheduler)

    @property
    def is_busy(self) -> bool:
        """Return whether there are unfinished requests."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def load(self, now_s: float) -> ReplicaLoad:
        """Return the load that a router knows at ``now_s``: after the last step that had ended by
        then, plus the requests sent since.
        """
        return self._next_report if now_s >= self.clock.now_s else self._reported

    def add(self, request: Request, now_s: float, may_refuse: bool = False) -> float | None:
        """Queue a request and include it in the loads that the router knows.

        Args:
            request: the request.
            now_s: time of the virtual clock.
            may_refuse: queue the request only if the scheduler can guarantee its SLOs. This is
                decided at the end of the current step, which is when the router learns of a
                refusal.

        Returns:
            Time of the refusal in seconds; None if the request was queued.
        """
        if not self.is_busy:
            self.clock.now_s = max(self.clock.now_s, now_s)
        is_queued = True
        if may_refuse:
            is_queued = self.scheduler.offer(request, self.clock.now_s)
        else:
            self.scheduler.add(request)
        need = need_of(request, self.scheduler.limits)
        is_guaranteed = may_refuse or bool(request.is_guaranteed)
        if now_s < self.clock.now_s:
            self._reported = self._reported.with_request(need, is_guaranteed)
        if is_queued:
            self._next_report = self._next_report.with_request(need, is_guaranteed)
        return None if is_queued else self.clock.now_s

    def step(self) -> StepEvent:
        """Run one engine step, which must advance the clock."""
        before_s = self.clock.now_s
        event = self.engine.step()
        assert self.clock.now_s > before_s, "the step was empty, so the clock did not advance"
        return event

    def report(self) -> None:
        """Publish the load after :meth:`step`. Until the virtual time at which the step ends,
        :meth:`load` returns the load before it.
        """
        self._reported = self._next_report
        self._next_report = load_of(self.scheduler)


class Simulation:
    """Simulation of a load on one or several replicas of a system; deterministic for a given seed.

    Args:
        jobs: the requests of the load.
        library: the texts of the requests, in the order of ``jobs``.
        hardware: latencies of the models, the same for all replicas.
        config: settings of every replica.
        replicas: number of engines that share the load.
        router: one of :data:`~hf_slospec.lab.systems.ROUTERS`, for several replicas.
        seed: seed of the router and of the drafters.
        oracle: replace the config's policy by one that knows which tokens will be accepted:
            AdaServe's Algorithm 1 if the config's policy is ``adaserve``, otherwise
            :class:`~hf_slospec.lab.models.OraclePolicy`.
        make_policy: makes a custom policy in place of the config's; its plans are limited by the
            config's ``max_depth`` and ``max_width``.
        new_clock: makes the clock of a replica, for example of a machine whose speed changes.
        new_drafter: makes the drafter of a replica.

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
        router: str = OURS,
        seed: int = 0,
        oracle: bool = False,
        make_policy: NewPolicy | None = None,
        new_clock: Callable[[], VirtualClock] = VirtualClock,
        new_drafter: NewDrafter = SimulatedDrafter,
    ):
        if not jobs:
            raise InvalidInputError("the load contains no requests; give at least one")
        if oracle and make_policy is not None:
            raise InvalidInputError("oracle and make_policy exclude each other; give one of them")
        if not 1 <= replicas <= MAX_REPLICAS:
            raise InvalidInputError(f"replicas must be within 1..{MAX_REPLICAS}, got {replicas}")
        if len(library.lengths) != len(jobs):
            raise InvalidInputError(
                f"every request needs a text, got {len(jobs)} requests, {len(library.lengths)} "
                "texts"
            )
        if config.policy not in ("none", "auto") and config.max_width > library.num_children:
            raise InvalidInputError(
                f"max_width is {config.max_width}, but the texts have only {library.num_children} "
                "children per position; lower max_width, or write the texts with more num_children"
            )
        if not all(0.0 <= job.arrival_s <= MAX_TIME_S for job in jobs):
            raise InvalidInputError(f"requests must arrive within 0..{MAX_TIME_S:g} seconds")
        continued = {
            index: job.after
            for index, job in enumerate(jobs)
            if job.continues and job.after is not None
        }
        self.replicas = [
            Replica(
                config,
                hardware,
                library,
                seed + index,
                oracle,
                make_policy,
                new_clock(),
                new_drafter,
                continued,
            )
            for index in range(replicas)
        ]
        limits = self.replicas[0].scheduler.limits
        for index, job in enumerate(jobs):  # checked before prompts are allocated
            needed = job.input_tokens + job.max_output_tokens + limits.max_nodes
            if needed > limits.kv_tokens:
                raise InvalidInputError(
                    f"request {index} needs {needed} tokens of K/V cache ({job.input_tokens} for "
                    "its prompt, "
                    f"{job.max_output_tokens} for its output, {limits.max_nodes} for its draft "
                    "tree), "
                    f"but the hardware has {limits.kv_tokens}; raise kv_tokens or shorten the "
                    "request"
                )
        self._router = router_of(router, seed)
        # Index of a request -> indices of the requests that arrive after it has finished
        self._followers: dict[int, list[int]] = {}
        for index, job in enumerate(jobs):
            longest = math.inf  # refuses `continues` without `after` below
            if job.after is not None:
                if not 0 <= job.after < index:
                    raise InvalidInputError(
                        f"request {index} follows request {job.after}; a request can only follow "
                        "one before it"
                    )
                self._followers.setdefault(job.after, []).append(index)
                longest = jobs[job.after].input_tokens + jobs[job.after].output_tokens
            if job.continues and job.input_tokens <= longest:
                raise InvalidInputError(
                    f"request {index} continues another, so `after` must name that one, and its "
                    "own input_tokens must exceed input_tokens + output_tokens of that one"
                )
        self._requests = [
            _RoutedRequest(_request(index, job), job) for index, job in enumerate(jobs)
        ]

    def run(self, system: str = "", on_end: Callable[[], object] = lambda: None) -> Run:
        """Simulate the whole load.

        Args:
            system: name of the system in the result.
            on_end: called after each finished request.
        """
        jobs = [routed.job for routed in self._requests]
        arrivals = [(job.arrival_s, index) for index, job in enumerate(jobs) if job.after is None]
        heapq.heapify(arrivals)
        totals = Totals()
        num_left = len(jobs)
        while num_left:
            busy = [replica for replica in self.replicas if replica.is_busy]
            now_s = min((replica.clock.now_s for replica in busy), default=math.inf)
            if arrivals and arrivals[0][0] <= now_s:
                arrival_s, index = heapq.heappop(arrivals)
                refused_s = self._route(self._requests[index], arrival_s)
                if refused_s is not None:
                    heapq.heappush(arrivals, (refused_s, index))
                continue
            replica = min(busy, key=lambda replica: replica.clock.now_s)
            event = replica.step()
            if len(self.replicas) > 1:
                replica.report()
            totals.add(event)
            for part in event.decoding:
                routed = self._requests[part.index]
                if routed.decode_begun_s is None:
                    routed.decode_begun_s = event.begun_s
            for part in event.requests:
                request = self._requests[part.index].request
                if request.error is not None:  # in a simulation it can only be an interrupt
                    raise request.error
                if not request.is_finished:
                    continue
                num_left -= 1
                for index in self._followers.get(part.index, ()):
                    job = jobs[index]
                    job = replace(job, arrival_s=replica.clock.now_s + job.arrival_s)
                    self._requests[index] = _RoutedRequest(_request(index, job), job)
                    heapq.heappush(arrivals, (job.arrival_s, index))
                on_end()
        outcomes = []
        not_guaranteed = 0
        for routed in self._requests:
            request = routed.request
            # A request without a decode step ended with the token that its prefill chose.
            begun_s = routed.decode_begun_s
            begun_s = request.stats.last_token_s if begun_s is None else begun_s
            num_refused = len(routed.refused_by)
            outcomes.append(Outcome.of(request, routed.job, routed.replica, begun_s, num_refused))
            not_guaranteed += request.params.has_slo and not request.is_guaranteed
        return Run(system, tuple(outcomes), totals, not_guaranteed)

    def _route(self, routed: _RoutedRequest, now_s: float) -> float | None:
        """Send a request to the replica that the router chooses.

        Returns:
            Time at which that replica refuses the request, in seconds; None if it is queued.
        """
        request = routed.request
        if len(self.replicas) == 1:
            return self.replicas[0].add(request, now_s)
        loads = [replica.load(now_s) for replica in self.replicas]
        schedulers = [replica.scheduler for replica in self.replicas]
        need = need_of(request, schedulers[0].limits)
        choice = self._router(Arrival(request, need, loads, routed.refused_by, schedulers, now_s))
        routed.replica = choice.replica
        refused_s = self.replicas[choice.replica].add(request, now_s, choice.may_refuse)
        if refused_s is not None:
            routed.refused_by.append(choice.replica)
        return refused_s


def _request(index: int, job: Job) -> Request:
    end = job.input_tokens + job.output_tokens
    params = RequestParams(
        [0] * job.input_tokens,
        job.max_output_tokens,
        _stages(job),
        job.ttft_slo_s,
        job.priority,
        is_sampled=job.is_sampled,
        is_stop=lambda tokens: len(tokens) >= end,
    )
    return Request(index, params, job.arrival_s)


def _stages(job: Job) -> tuple[Stage, ...]:
    """Return the SLO stages of a request: thinking and answer, or the answer only.

    As with real models, the scheduler does not know in advance how many tokens thinking takes.
    """
    if not job.think_tokens:
        return (Stage(job.tpot_slo_s),)
    end = job.input_tokens + job.think_tokens
    think = Stage(job.think_tpot_slo_s, is_over=lambda tokens: len(tokens) >= end)
    return think, Stage(job.tpot_slo_s, ttft_slo_s=job.answer_ttft_slo_s)
