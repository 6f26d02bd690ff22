"""Deterministic simulation of the batcher: a seed makes a plan of users, faults and times, and the
run is checked.

Batcher, handles, engine, scheduler, K/V cache, drafters and telemetry are the real ones. Threads,
clock and the two networks are simulated.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.service import _stream
from hf_slospec.errors import NotGuaranteedError, NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.simulation.engines import Engines, Server
from tests.support.simulation.models import VOCAB, plain_token
from tests.support.simulation.schedules import (
    Cancel,
    DeviceError,
    Generate,
    Job,
    Load,
    Pause,
    Start,
    Stop,
)
from tests.support.simulation.threads import Thread, World

BEGINNINGS = [[random.Random(family).randrange(VOCAB) for _ in range(60)] for family in range(2)]


class ProcessorError(Exception):
    """Of a request's own processor."""


class StreamerError(Exception):
    """Of a request's own streamer."""


class UserError(Exception):
    """With which a user ends a request."""


@dataclass(eq=False)
class Submitted:
    """A request that was accepted, and what its user saw."""

    job: Job
    server: Server
    handle: RequestHandle
    seen: list[int] | None = None  # tokens of its stream, which has ended
    is_cancelled: bool = False  # by its user, or a stop
    expected: tuple[type[BaseException], ...] = ()  # errors with which it may end


class Streamer:
    def __init__(self, submitted, world):
        self.submitted, self.world, self.tokens, self.has_ended = (
            submitted,
            world,
            [],
            False,
        )

    def put(self, tokens):
        self.world.at("streamer")
        after = self.submitted.job.ends_after
        if after is not None and len(self.tokens) > after:
            self.submitted.expected += (StreamerError,)
            raise StreamerError
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.has_ended = True


class Simulation:
    """One run of a schedule."""

    def __init__(self, plan):
        self.plan = plan
        self.world = World(plan.seed, plan.switching)
        self.world.faults = {(fault.point, fault.number): fault.error() for fault in plan.faults}
        self.submitted = []
        self.num_tried = 0
        self.stops = [
            False
        ] * plan.num_batchers  # whether a stop without drain, or in time, may have ended requests

    def run(self):
        """Run the schedule; raises AssertionError where something is wrong."""
        with self.world.in_place():
            self.engines = Engines(self.plan, self.world)
            self.servers = [Server(self.engines) for _ in range(self.plan.num_batchers)]
            threads = [
                Thread(self.world, self._user, (actions,), f"user {n}")
                for n, actions in enumerate(self.plan.users)
            ]
            for server in self.servers:
                server.batcher.start()
            for thread in threads:
                thread.start()
            last = Thread(self.world, self._end, (list(threads),), "last")
            last.start()
            self.world.run()
        self._check()

    @property
    def counts(self):
        """What happened, by what it was and how often."""
        counts = Counter(self.engines.counts)
        counts["restarts"] = counts.pop("starts") - len(self.servers)
        for point, error in self.world.struck:
            counts[f"struck {point} {type(error).__name__}"] += 1
        for own in self.submitted:
            request = own.handle.request
            counts["requests"] += 1
            counts[f"ended {request.finish_reason}"] += 1
            if request.error is not None:
                counts[f"failed {type(request.error).__name__}"] += 1
            counts["tokens"] += request.num_emitted - request.stats.num_resumed
            counts["preemptions"] += request.stats.num_preempted
            counts["prefixes reused"] += request.kv.num_reused > 0
            counts["resumed"] += request.stats.num_resumed > 0
            counts["guaranteed"] += request.is_guaranteed is True
        return counts

    # ---- users

    def _user(self, actions):
        own = []
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
                case Generate():
                    self._generate(action)

    def _new_request(self, job, is_stop, progress=None):
        self.num_tried += 1
        rng = random.Random(f"{job.family} {job.prompt_len} {job.own_tokens}")
        shared = job.prompt_len - job.own_tokens
        prompt = BEGINNINGS[job.family][:shared] + [
            rng.randrange(VOCAB) for _ in range(job.own_tokens)
        ]
        # Sampled requests of equal number mod 8 have the same noise.
        index = 8 * self.num_tried + job.prompt_len % 8
        params = RequestParams(
            prompt, job.new, (Stage(job.tpot_slo_s),), job.ttft_slo_s, job.priority, job.best_effort,
            job.must_guarantee, job.salt, is_sampled=job.is_sampled, is_stop=is_stop,
            has_callbacks=job.is_sampled,
            e2e_slo_s=rng.choice([None, None, 1e-3, 20.0, 1e7]),
        )  # fmt: skip
        return Request(index, params, self.world.now_s, progress)

    def _generate(self, call):
        requests = [self._new_request(job, partial(_is_stop, job)) for job in call.jobs]
        expected = [
            _decoded_alone(own, job).tokens for own, job in zip(requests, call.jobs, strict=True)
        ]
        try:
            self.engines.generate(requests)
        except (MemoryError, DeviceError) as error:
            self.engines.counts[f"generate: {type(error).__name__}"] += 1
            kinds = _MEMORY if isinstance(error, MemoryError) else DeviceError
            if not any(isinstance(struck, kinds) for _, struck in self.world.struck):
                raise AssertionError("generate failed with an error of its own") from error
            expected = [
                tokens[: len(own.tokens)] for tokens, own in zip(expected, requests, strict=True)
            ]
        else:
            self.engines.counts["generate"] += 1
        assert [request.tokens for request in requests] == expected, "generate gives wrong tokens"

    def _submit(self, job, progress=None):
        server = self.servers[job.batcher]
        error = MemoryError("of a processor") if job.processor_memory else ProcessorError()
        fails_in_criterion = job.fails_at is not None and job.in_criterion
        is_stop = (
            partial(_is_stop, job, error=error) if fails_in_criterion else partial(_is_stop, job)
        )
        request = self._new_request(job, is_stop, progress)
        handle = RequestHandle(request, None, server.batcher.abort, None)
        submitted = Submitted(job, server, handle)
        if job.fails_at is not None:
            submitted.expected += (type(error),)
            if not job.in_criterion:
                server.sampler.fails_at[request] = job.fails_at, error
        server.batcher.submit(handle, job.block, job.timeout)
        self.submitted.append(submitted)
        return submitted

    def _consume(self, submitted):
        job = submitted.job
        handle = submitted.handle
        if job.consumer == "streamer":
            streamer = Streamer(submitted, self.world)
            Thread(
                self.world, self._stream, (submitted, streamer), f"streamer {handle.request.index}"
            ).start()
        elif job.consumer == "tokens":
            Thread(self.world, self._read, (submitted,), f"reader {handle.request.index}").start()
        elif job.consumer == "result":
            self._read_result(submitted)

    def _stream(self, submitted, streamer):
        _stream(
            submitted.handle,
            torch.tensor([submitted.handle.request.tokens[: submitted.job.prompt_len]]),
            streamer,
        )
        assert streamer.has_ended

    def _read(self, submitted):
        job = submitted.job
        handle = submitted.handle
        seen = []
        with contextlib.suppress(RequestCancelledError, *_ERRORS):
            for token in handle.tokens():
                seen.append(token)
                if job.ends_after is not None and len(seen) > job.ends_after:
                    self._abort(submitted)
        submitted.seen = seen
        if job.resumes and handle.finish_reason == "cancelled" and submitted.job.fails_at is None:
            with contextlib.suppress(QueueFull, NotRunningError):
                self._read(
                    self._submit(replace(job, ends_after=None, resumes=False), handle.progress)
                )

    def _abort(self, submitted):
        if submitted.job.ends_with_error:
            submitted.expected += (UserError,)
            submitted.handle.fail(UserError())
        else:
            submitted.is_cancelled = True
            submitted.handle.cancel()

    def _read_result(self, submitted):
        job = submitted.job
        handle = submitted.handle
        if job.ends_after is not None:
            with contextlib.suppress(TimeoutError, RequestCancelledError, *_ERRORS):
                handle.result(timeout=0.7 * job.ends_after)
            self._abort(submitted)
        with contextlib.suppress(RequestCancelledError, *_ERRORS):
            result = handle.result()
            assert result.token_ids == handle.token_ids

    def _end(self, threads):
        for thread in threads:
            thread.join()
        for server in self.servers:
            server.batcher.stop(drain=True, timeout=None)

    # ---- checks

    def _check(self):
        struck = [error for _, error in self.world.struck]
        memory = [error for error in struck if isinstance(error, _MEMORY)]
        fatal = [error for error in struck if isinstance(error, DeviceError)]
        num_short = 0
        for own in self.submitted:
            num_short += self._check_request(own, fatal, memory)
        # A step of one token is the least there is; all others are made smaller first.
        most = max(len(memory) - (self.plan.limits.prefill_chunk > 1), 0)
        assert num_short <= most, (
            f"{num_short} requests failed as memory ran short {len(memory)} times"
        )
        for server in self.servers:
            batcher = server.batcher
            left = [batcher._handles, batcher._orders]
            assert not any(left), f"orders are kept: {left}"
            assert not any(batcher.counts)
            assert "died" not in batcher._why_not or fatal, f"the engine died: {batcher._why_not}"
            ended = [own.handle.request for own in self.submitted if own.server is server]
            assert sorted(r.index for r in server.ended) == sorted(r.index for r in ended), (
                "on_end is not called once"
            )
            if not struck:
                self._check_counts(server)
        assert self.engines.target.num_held == self.engines.draft.num_held == 0, (
            "K/V was left behind"
        )

    def _check_request(self, own, fatal, memory):
        """Check one request; return whether it failed because memory ran short."""
        job = own.job
        handle = own.handle
        request = own.handle.request
        name = f"request {request.index}"
        assert handle.done(), f"{name} does not end"
        alone = _decoded_alone(request, job)
        tokens = handle.token_ids
        assert tokens == request.tokens[request.prompt_len :], (
            f"{name} has tokens that its handle does not show"
        )
        assert tokens == alone.tokens[alone.prompt_len :][: len(tokens)], (
            f"{name} has wrong tokens: {tokens}"
        )
        if own.seen is not None:
            assert own.seen == tokens, f"{name} streamed {own.seen} of {tokens}"
        reason = request.finish_reason
        error = request.error
        is_short = False
        if reason in ("stop", "length"):
            assert error is None
            assert (tokens, reason) == (alone.tokens[alone.prompt_len :], alone.finish_reason), (
                f"{name} ends early"
            )
            assert [commit.num_emitted for commit in handle.commits][-1:] == [len(tokens)], (
                f"{name} lacks a commit"
            )
            assert (
                len(handle.from_draft) == len(tokens) - request.stats.num_resumed
                or request.stats.num_resumed
            )
        elif reason == "cancelled":
            assert own.is_cancelled or self.stops[job.batcher], f"{name} was cancelled by nothing"
        elif isinstance(error, NotGuaranteedError):
            assert job.must_guarantee and len(tokens) == request.stats.num_resumed
        elif not isinstance(error, own.expected):
            is_short = isinstance(error, MemoryError) and bool(memory)
            assert is_short or error in fatal, f"{name} failed with {error!r}"
        return is_short

    def _check_counts(self, server):
        stats = server.telemetry.stats(
            running=0, waiting=0, kv_tokens=0, kept_tokens=0, kv_limit=0, memory=None, forwards={}
        )
        reasons = [own.handle.request for own in self.submitted if own.server is server]
        done = [request for request in reasons if request.finish_reason in ("stop", "length")]
        assert stats.finished.get("length", 0) + stats.finished.get("stop", 0) == len(done)
        guaranteed = sum(
            request.metrics().guaranteed and request.params.has_slo for request in done
        )
        assert stats.guaranteed == guaranteed, "a guarantee is not counted once"


def _is_stop(job, tokens, error=None):
    """The job's criterion, which raises an error at a position."""
    position = len(tokens) - job.prompt_len - 1
    if error is not None and position == job.fails_at:
        raise error
    return position == job.stops_at


def _decoded_alone(request, job):
    """A request of the same prompt, decoded plainly to its end."""
    alone = Request(request.index, replace(request.params, is_stop=partial(_is_stop, job)))
    while not alone.emit(plain_token(alone)):
        pass
    return alone


_MEMORY = (MemoryError, torch.OutOfMemoryError)
_ERRORS = (ProcessorError, StreamerError, UserError, DeviceError, MemoryError, NotGuaranteedError)


def simulate(plan):
    """Run a schedule, and return what is wrong, None if nothing is, and what happened."""
    simulation = Simulation(plan)
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        return error, Counter()
    return None, simulation.counts


def fault_of(plan):
    """Run a schedule, and return what is wrong; None if nothing is."""
    return simulate(plan)[0]
