"""Deterministic simulation of the batcher: a seed makes a plan of users, faults and times, and the run is checked.

Batcher, handles, engine, scheduler, K/V cache, drafters and telemetry are the real ones. Threads, clock and the two
networks are simulated.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_slospec.assembly import Parts, continuous_engine
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.protocols import Plan as DraftPlan
from hf_slospec.engine.protocols import Schedule as StepSchedule
from hf_slospec.engine.request import Progress, Request, Stage
from hf_slospec.engine.scheduling.continuous import MAX_SITS, ContinuousScheduler, Limits
from hf_slospec.engine.step import Engine
from hf_slospec.errors import NotGuaranteedError, NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.models.drafters.assistant import AssistantDrafter
from hf_slospec.models.drafters.prompt_lookup import PromptLookupDrafter
from hf_slospec.models.target import PackedTarget
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.serving.batcher import Batcher
from hf_slospec.serving.handle import RequestHandle
from hf_slospec.serving.service import _stream
from hf_slospec.serving.telemetry import Telemetry
from tests.support.simulated_models import VOCAB, SimulatedModel, SimulatedSampler, plain_token
from tests.support.simulated_threads import Thread, World
from tests.support.toy_models import WholeTrees, new_costs

MEMORY = ("target pool", "target move", "target copy", "target repack", "target forward", "sampler")
DRAFT_MEMORY = ("draft pool", "draft copy", "draft repack", "draft forward")
OBSERVER = ("on_step", "on_end")
FATAL = ("target forward", "target move", "draft forward", "close")
BEGINNINGS = [[random.Random(family).randrange(VOCAB) for _ in range(60)] for family in range(2)]


class ProcessorError(Exception):
    """Of a request's own processor."""


class StreamerError(Exception):
    """Of a request's own streamer."""


class UserError(Exception):
    """With which a user ends a request."""


class DeviceError(Exception):
    """Of the whole engine."""


@dataclass(frozen=True)
class Job:
    """A request, and what its user does with it."""

    family: int
    prompt_len: int
    own_tokens: int  # of its prompt, behind the common beginning
    new: int
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    priority: int = 0
    best_effort: bool = False
    must_guarantee: bool = False
    is_sampled: bool = False
    salt: str = ""
    consumer: str = "result"  # "result", "tokens", "streamer" or "none"
    ends_after: int | None = None  # tokens after which the user cancels it, or ends it with an error
    ends_with_error: bool = False
    fails_at: int | None = None  # position at which its processor raises
    processor_memory: bool = False  # MemoryError
    stops_at: int | None = None  # position after which its criterion stops it
    block: bool = False
    timeout: float | None = None
    resumes: bool = False  # if it is cancelled, another request goes on
    batcher: int = 0


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Stop:
    drain: bool
    timeout: float | None
    batcher: int = 0


@dataclass(frozen=True)
class Start:
    batcher: int = 0


@dataclass(frozen=True)
class Load:
    batcher: int = 0


@dataclass(frozen=True)
class Cancel:
    """Cancel a request of this user, by its number."""

    number: int


@dataclass(frozen=True)
class Step:
    """Hold the models for a while, as a ``generate`` call does."""

    seconds: float


Action = Job | Pause | Stop | Start | Load | Cancel | Step


@dataclass(frozen=True)
class Fault:
    point: str
    number: int  # of the calls of this point
    kind: str  # "memory", "torch" (its own class), "observer" or "fatal"

    def error(self) -> BaseException:
        errors = {"memory": MemoryError, "torch": torch.OutOfMemoryError, "observer": KeyError, "fatal": DeviceError}
        return errors[self.kind](f"injected: {self.point} {self.number}")


@dataclass(frozen=True)
class Schedule:
    """All that happens in one simulation, but for the order of the threads, which the seed decides."""

    seed: int
    limits: Limits
    max_queue: int
    kept: float
    admission: str
    prefill: str
    policy: str
    depth: int
    width: int
    has_assistant: bool
    num_batchers: int
    seconds: tuple[float, ...]  # of forwards, in turn
    users: tuple[tuple[Action, ...], ...]
    faults: tuple[Fault, ...]
    switching: float


def schedule_of(seed: int) -> Schedule:
    """Draw a schedule."""
    rng = random.Random(seed)
    num_batchers = rng.choice([1, 1, 1, 2])
    depth, width = rng.choice([(0, 1), (1, 1), (2, 2), (3, 1)])
    has_assistant = rng.random() < 0.5
    max_nodes = depth * width
    kv_tokens = rng.choice([70, 90, 130, 400]) + max_nodes
    starvation_s = rng.choice([2.0, 20.0, 1e9])
    limits = Limits(rng.randrange(1, 5), kv_tokens, max_nodes, rng.choice([1, 4, 16, 16, 64, 64]), starvation_s)
    users = tuple(
        tuple(_action(rng, kv_tokens - max_nodes, num_batchers) for _ in range(rng.randrange(1, 5)))
        for _ in range(rng.randrange(1, 4))
    )
    return Schedule(
        seed, limits, rng.choice([1, 3, 100]), rng.choice([0, 40, float("inf")]),
        rng.choice(["slo", "slo", "slo", "edf", "fcfs", "priority"]),
        rng.choice(["beside", "beside", "first", "chunked"]),
        rng.choice(["whole", "whole", "whole", "auto"]), depth, width, has_assistant, num_batchers,
        tuple(rng.choice([0.0, 0.1, 1.0, 1.0, 1.0, 3.0, 1e5]) for _ in range(7)),
        users, _faults(rng), rng.choice([0.1, 0.5, 0.9]),
    )  # fmt: skip


def _action(rng: random.Random, room: int, num_batchers: int) -> Action:
    batcher, kind = rng.randrange(num_batchers), rng.random()
    if kind < 0.7:
        new = rng.choice([1, 2, 5, 9])
        prompt_len = rng.randrange(1, min(50, room - new))
        must_guarantee = rng.random() < 0.1
        return Job(
            family=rng.randrange(2), prompt_len=prompt_len, own_tokens=rng.randrange(min(prompt_len, 6)), new=new,
            tpot_slo_s=rng.choice([None, None, 1e-6, 2.0, 1e3]), ttft_slo_s=rng.choice([None, None, 3.0, 60.0, 1e7]),
            priority=rng.randrange(2), best_effort=not must_guarantee and rng.random() < 0.2,
            must_guarantee=must_guarantee,
            is_sampled=rng.random() < 0.5, salt=rng.choice(["", "", "x"]),
            consumer=rng.choice(["result", "tokens", "streamer", "none"]),
            ends_after=rng.choice([None, None, None, 0, 2]), ends_with_error=rng.random() < 0.3,
            fails_at=rng.choice([None] * 6 + [0, 2]), processor_memory=rng.random() < 0.3,
            stops_at=rng.choice([None, None, 1, 3]), block=rng.random() < 0.5, timeout=rng.choice([None, 0.5, 50.0]),
            resumes=rng.random() < 0.5, batcher=batcher,
        )  # fmt: skip
    return rng.choice(
        [
            Pause(rng.choice([0.0, 1.0, 10.0, 1e6])), Pause(1.0),
            Stop(rng.random() < 0.6, rng.choice([None, 0.0, 2.0]), batcher), Start(batcher), Load(batcher),
            Cancel(rng.randrange(3)), Cancel(0), Step(rng.choice([0.0, 1.0, 5.0])),
        ]
    )  # fmt: skip


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    kind, memory = rng.random(), (*MEMORY, *DRAFT_MEMORY)
    if kind < 0.3:
        return ()
    if kind < 0.75:
        return tuple(
            Fault(rng.choice(memory), rng.choice([0, 0, 1, 2, 3, 5, 8]), rng.choice(["memory", "torch"]))
            for _ in range(rng.choice([1, 1, 2, 3, 6]))
        )
    if kind < 0.85:
        point, first = rng.choice(["target forward", "draft forward", "sampler"]), rng.randrange(6)
        return tuple(Fault(point, first + number, "memory") for number in range(rng.choice([3, 8, 16])))
    if kind < 0.93:
        return (Fault(rng.choice(OBSERVER), rng.randrange(3), "observer"),)
    return (Fault(rng.choice(FATAL), rng.randrange(6), "fatal"),)


class CheckedScheduler(ContinuousScheduler):
    """Checks what the scheduler guarantees, at every step."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.left_out = dict[Request, int]()  # steps in a row

    def enter(self, now_s: float) -> list[Request]:
        waited = dict.fromkeys(self.waiting)
        starving = [request for request in waited if now_s >= self._waiting_since[request] + self.limits.starvation_s]
        guaranteed = {request for request in (*self.running, *waited) if request.is_guaranteed}
        preempted = super().enter(now_s)
        assert all(request.is_guaranteed for request in guaranteed), "a guarantee was taken back"
        present = [*self.running, *self.waiting]
        assert len(set(present)) == len(present), "a request is held twice"
        assert {*waited} <= {*present}, "a request was lost"
        assert len(self.running) <= self.limits.max_batch
        assert self.kv_held <= self.limits.kv_tokens
        booked = [request for request in present if request.is_guaranteed]
        if self.admission == "slo":
            assert len(booked) <= self.limits.max_batch, "more is guaranteed than there are places"
            # Texts only: where nodes find no room beside them, they are decoded without drafts.
            assert sum(request.max_len for request in booked) <= self.limits.kv_tokens, "K/V is guaranteed twice"
        entered = [request for request in self.running if request in waited]
        left = [request for request in starving if request in self.waiting]
        if left:
            assert all(request in starving for request in entered), "a starving request was overtaken"
        return preempted

    def schedule(self, now_s: float) -> StepSchedule:
        schedule = super().schedule(now_s)
        taking_part = {*schedule.decoding, *(chunk.request for chunk in schedule.chunks)}
        assert taking_part or not self.running, "a step does nothing"
        if self.prefill == "first":  # which leaves all others out as long as prompts come
            return schedule
        most = (MAX_SITS + 1) * self.limits.max_batch  # each of them may be left out before one takes part
        for request in self.running:
            self.left_out[request] = 0 if request in taking_part else self.left_out.get(request, 0) + 1
            assert self.left_out[request] <= most, f"request {request.index} starves"
        return schedule


class Server:
    """One batcher with its engine's parts."""

    def __init__(self, simulation: Simulation):
        self.simulation, plan = simulation, simulation.plan
        self.telemetry, self.ended, self.most_running = Telemetry(), list[Request](), 0
        self.sampler = SimulatedSampler(simulation.world)
        self.batcher = Batcher(self._engine, plan.max_queue, simulation.lock, self)

    def _engine(self) -> Engine[ContinuousScheduler]:
        simulation, plan = self.simulation, self.simulation.plan
        limits, costs = plan.limits, new_costs()
        target = PackedTarget(simulation.target, limits.max_nodes, self.sampler, limits.kv_tokens, plan.kept)
        drafter: Any = PromptLookupDrafter()
        if plan.has_assistant:
            drafter = AssistantDrafter(simulation.draft, limits.max_nodes, VOCAB, limits.kv_tokens, plan.kept)
        config = SLOSpecConfig(max_depth=max(plan.depth, 1), max_width=plan.width, check_invariants=True)
        policy: Any = WholeTrees(DraftPlan(plan.depth, plan.width))
        if plan.policy == "auto" and plan.depth:
            policy = new_policy(config, costs, SpeculationHistory(config))
        parts = Parts(target, drafter, policy, costs, simulation.world.clock)
        engine = continuous_engine(config, parts, limits)
        engine.scheduler = CheckedScheduler(limits, costs, plan.admission, plan.prefill, target.num_reusable)
        close = engine.close

        def closed() -> None:
            close()
            simulation.world.at("close")

        engine.close = closed
        return engine

    def on_step(self, step: StepEvent) -> None:
        self.most_running = max(self.most_running, len(step.requests))
        self.simulation.world.at("on_step")
        self.telemetry.on_step(step)

    def on_end(self, request: Request) -> None:
        self.ended.append(request)
        self.simulation.world.at("on_end")
        self.telemetry.on_end(request)


@dataclass(eq=False)
class Submitted:
    """A request that was accepted, and what its user saw."""

    job: Job
    server: Server
    handle: RequestHandle
    prompt: list[int]
    seen: list[int] | None = None  # tokens of its stream, which has ended
    is_cancelled: bool = False  # by its user, or a stop
    expected: tuple[type[BaseException], ...] = ()  # errors with which it may end


class Streamer:
    def __init__(self, submitted: Submitted, world: World):
        self.submitted, self.world, self.tokens, self.has_ended = submitted, world, list[int](), False

    def put(self, tokens: torch.Tensor) -> None:
        self.world.at("streamer")
        after = self.submitted.job.ends_after
        if after is not None and len(self.tokens) > after:
            self.submitted.expected += (StreamerError,)
            raise StreamerError
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


class Simulation:
    """One run of a schedule."""

    def __init__(self, plan: Schedule):
        self.plan, self.world = plan, World(plan.seed, plan.switching)
        self.world.faults = {(fault.point, fault.number): fault.error() for fault in plan.faults}
        self.target = SimulatedModel(self.world, "target", plan.seconds)
        self.draft = SimulatedModel(self.world, "draft", [0.01])
        self.submitted = list[Submitted]()
        self.num_tried = 0
        self.stops = [
            False
        ] * plan.num_batchers  # whether a stop without drain, or in time, may have cancelled requests

    def run(self) -> None:
        """Run the schedule; raises AssertionError where something is wrong."""
        with self.world.in_place():
            self.lock = FairLock()
            self.servers = [Server(self) for _ in range(self.plan.num_batchers)]
            threads = [
                Thread(self.world, self._user, (actions,), f"user {n}") for n, actions in enumerate(self.plan.users)
            ]
            for server in self.servers:
                server.batcher.start()
            for thread in threads:
                thread.start()
            last = Thread(self.world, self._end, (list(threads),), "last")
            last.start()
            self.world.run()
        self._check()

    # ---- users

    def _user(self, actions: tuple[Action, ...]) -> None:
        own = list[Submitted]()
        for action in actions:
            batcher = self.servers[getattr(action, "batcher", 0)].batcher
            match action:
                case Job():
                    with contextlib.suppress(QueueFull, NotRunningError):
                        own.append(self._submit(action))
                        self._consume(own[-1])
                case Pause(seconds):
                    self.world.wait_for(lambda: False, seconds)
                case Stop(drain, timeout):
                    self.stops[action.batcher] |= not drain or timeout is not None
                    batcher.stop(drain, timeout)
                case Start():
                    batcher.start()
                case Load():
                    with contextlib.suppress(NotRunningError):
                        future = batcher.load()
                        self.world.wait_for(future.done)
                        if future.exception() is None:
                            assert future.result().best_effort >= 0
                case Cancel(number):
                    if number < len(own):
                        own[number].is_cancelled = True
                        own[number].handle.cancel()
                case Step(seconds):
                    with self.lock:
                        self.world.at("other forward", seconds)

    def _submit(self, job: Job, progress: Progress | None = None) -> Submitted:
        server, self.num_tried = self.servers[job.batcher], self.num_tried + 1
        rng = random.Random(f"{job.family} {job.prompt_len} {job.own_tokens}")
        shared = job.prompt_len - job.own_tokens
        prompt = BEGINNINGS[job.family][:shared] + [rng.randrange(VOCAB) for _ in range(job.own_tokens)]
        # Sampled requests of equal number mod 8 have the same noise.
        index = 8 * self.num_tried + job.prompt_len % 8
        request = Request(
            index, list(prompt), job.new, (Stage(job.tpot_slo_s),),
            is_stop=lambda tokens: job.stops_at is not None and len(tokens) == job.prompt_len + job.stops_at + 1,
            arrived_s=self.world.now_s, is_sampled=job.is_sampled, ttft_slo_s=job.ttft_slo_s, priority=job.priority,
            is_best_effort=job.best_effort, cache_salt=job.salt, must_guarantee=job.must_guarantee,
        )  # fmt: skip
        if progress is not None:
            request.resume(progress, self.world.now_s)
        handle = RequestHandle(request, None, server.batcher.abort, None)
        submitted = Submitted(job, server, handle, prompt)
        if job.fails_at is not None:
            error = MemoryError("of a processor") if job.processor_memory else ProcessorError()
            server.sampler.fails_at[request] = job.fails_at, error
            submitted.expected += (type(error),)
        server.batcher.submit(handle, job.block, job.timeout)
        self.submitted.append(submitted)
        return submitted

    def _consume(self, submitted: Submitted) -> None:
        job, handle = submitted.job, submitted.handle
        if job.consumer == "streamer":
            streamer = Streamer(submitted, self.world)
            Thread(self.world, self._stream, (submitted, streamer), f"streamer {handle.request.index}").start()
        elif job.consumer == "tokens":
            Thread(self.world, self._read, (submitted,), f"reader {handle.request.index}").start()
        elif job.consumer == "result":
            self._read_result(submitted)

    def _stream(self, submitted: Submitted, streamer: Streamer) -> None:
        _stream(submitted.handle, torch.tensor([submitted.prompt]), streamer)
        assert streamer.has_ended

    def _read(self, submitted: Submitted) -> None:
        job, handle, seen = submitted.job, submitted.handle, list[int]()
        with contextlib.suppress(RequestCancelledError, *_ERRORS):
            for token in handle.tokens():
                seen.append(token)
                if job.ends_after is not None and len(seen) > job.ends_after:
                    self._abort(submitted)
        submitted.seen = seen
        if job.resumes and handle.finish_reason == "cancelled" and submitted.job.fails_at is None:
            with contextlib.suppress(QueueFull, NotRunningError):
                self._read(self._submit(replace(job, ends_after=None, resumes=False), handle.progress))

    def _abort(self, submitted: Submitted) -> None:
        if submitted.job.ends_with_error:
            submitted.expected += (UserError,)
            submitted.handle.fail(UserError())
        else:
            submitted.is_cancelled = True
            submitted.handle.cancel()

    def _read_result(self, submitted: Submitted) -> None:
        job, handle = submitted.job, submitted.handle
        if job.ends_after is not None:
            with contextlib.suppress(TimeoutError, RequestCancelledError, *_ERRORS):
                handle.result(timeout=0.7 * job.ends_after)
            self._abort(submitted)
        with contextlib.suppress(RequestCancelledError, *_ERRORS):
            result = handle.result()
            assert result.token_ids == handle.token_ids

    def _end(self, threads: list[Thread]) -> None:
        for thread in threads:
            thread.join()
        for server in self.servers:
            server.batcher.stop(drain=True, timeout=None)

    # ---- checks

    def _check(self) -> None:
        struck = [error for _, error in self.world.struck]
        memory = [error for error in struck if isinstance(error, (MemoryError, torch.OutOfMemoryError))]
        fatal = [error for error in struck if isinstance(error, DeviceError)]
        num_short = 0
        for own in self.submitted:
            num_short += self._check_request(own, fatal, memory)
        # A step of one token is the least there is; all others are made smaller first.
        most = max(len(memory) - (self.plan.limits.prefill_chunk > 1), 0)
        assert num_short <= most, f"{num_short} requests failed as memory ran short {len(memory)} times"
        for server in self.servers:
            batcher = server.batcher
            left = [batcher._handles, batcher._arrivals, batcher._aborted, batcher._asked]
            assert not any(left), f"orders are kept: {left}"
            assert (batcher.num_waiting, batcher.num_running, batcher.kv_held, batcher.num_kept) == (0, 0, 0, 0)
            assert "died" not in batcher._why_not or fatal, f"the engine died: {batcher._why_not}"
            ended = [own.handle.request for own in self.submitted if own.server is server]
            assert sorted(r.index for r in server.ended) == sorted(r.index for r in ended), "on_end is not called once"
            if not struck:
                self._check_counts(server)
        assert self.target.num_held == self.draft.num_held == 0, "K/V was left behind"

    def _check_request(self, own: Submitted, fatal: list[BaseException], memory: list[BaseException]) -> bool:
        """Check one request; return whether it failed because memory ran short."""
        job, handle, request = own.job, own.handle, own.handle.request
        name = f"request {request.index}"
        assert handle.done(), f"{name} does not end"
        alone = Request(request.index, list(own.prompt), job.new, is_sampled=job.is_sampled, is_stop=request.is_stop)
        while not alone.emit(plain_token(alone)):
            pass
        tokens = handle.token_ids
        assert tokens == request.tokens[request.prompt_len :], f"{name} has tokens that its handle does not show"
        assert tokens == alone.tokens[alone.prompt_len :][: len(tokens)], f"{name} has wrong tokens: {tokens}"
        if own.seen is not None:
            assert own.seen == tokens, f"{name} streamed {own.seen} of {tokens}"
        reason, error, is_short = request.finish_reason, request.error, False
        if reason in ("stop", "length"):
            assert error is None
            assert (tokens, reason) == (alone.tokens[alone.prompt_len :], alone.finish_reason), f"{name} ends early"
            assert [commit.num_emitted for commit in handle.commits][-1:] == [len(tokens)], f"{name} lacks a commit"
            assert len(handle.from_draft) == len(tokens) - request.num_resumed or request.num_resumed
        elif reason == "cancelled":
            assert own.is_cancelled or self.stops[job.batcher], f"{name} was cancelled by nothing"
        elif isinstance(error, NotGuaranteedError):
            assert job.must_guarantee and len(tokens) == request.num_resumed
        elif not isinstance(error, own.expected):
            is_short = isinstance(error, MemoryError) and bool(memory)
            assert is_short or error in fatal, f"{name} failed with {error!r}"
        return is_short

    def _check_counts(self, server: Server) -> None:
        stats = server.telemetry.stats(0, 0, 0, 0, 0, None)
        reasons = [own.handle.request for own in self.submitted if own.server is server]
        done = [request for request in reasons if request.finish_reason in ("stop", "length")]
        assert stats.finished.get("length", 0) + stats.finished.get("stop", 0) == len(done)
        guaranteed = sum(request.metrics().guaranteed and request.has_slo for request in done)
        assert stats.guaranteed == guaranteed, "a guarantee is not counted once"


_ERRORS = (ProcessorError, StreamerError, UserError, DeviceError, MemoryError, NotGuaranteedError)


def fault_of(plan: Schedule) -> BaseException | None:
    """Run a schedule, and return what is wrong; None if nothing is."""
    try:
        Simulation(plan).run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        return error
    return None


def shrunk(plan: Schedule) -> Schedule:
    """Return a smaller schedule that fails as well: fewer faults, users and actions, plainer settings."""
    while (smaller := next((other for other in _smaller(plan) if fault_of(other) is not None), None)) is not None:
        plan = smaller
    return plan


def _smaller(plan: Schedule) -> Iterator[Schedule]:
    for place in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:place] + plan.faults[place + 1 :])
    for place, actions in enumerate(plan.users):
        before, behind = plan.users[:place], plan.users[place + 1 :]
        yield replace(plan, users=before + behind)
        for at, action in enumerate(actions):
            yield replace(plan, users=(*before, actions[:at] + actions[at + 1 :], *behind))
            if isinstance(action, Job):
                plain = Job(action.family, action.prompt_len, action.own_tokens, action.new, batcher=action.batcher)
                for name in Job.__dataclass_fields__:
                    if getattr(action, name) != getattr(plain, name):
                        other = replace(action, **{name: getattr(plain, name)})
                        yield replace(plan, users=(*before, (*actions[:at], other, *actions[at + 1 :]), *behind))
    plain = dict(
        num_batchers=1, kept=0, has_assistant=False, policy="whole", prefill="beside", seconds=(1.0,), max_queue=100
    )
    for name, value in plain.items():
        if getattr(plan, name) != value and (name != "num_batchers" or not _uses_second(plan)):
            yield replace(plan, **{name: value})


def _uses_second(plan: Schedule) -> bool:
    return any(getattr(action, "batcher", 0) for actions in plan.users for action in actions)
