"""Engine of a front: sends requests to replicas; when one dies, others resume its requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from hf_slospec.batcher.stats import with_labels
from hf_slospec.errors import NotGuaranteedError, NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.replicas.directory import ReplicaDirectory
from hf_slospec.replicas.messages import (
    FAULTS,
    Alive,
    Answer,
    Broken,
    Declined,
    Description,
    Failed,
    Offer,
    Taken,
    ToReplica,
    Update,
    call,
    next_within,
)
from hf_slospec.replicas.options import ReplicaOptions
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.params import RequestParams, SubmitOptions
from hf_slospec.request.request import Request
from hf_slospec.request.slo import parse_slo
from hf_slospec.request.state import FinishReason, Progress
from hf_slospec.scheduler.guarantees import first_token_slo_s, tightest_tpot_slo_s
from hf_slospec.scheduler.load import Need
from hf_slospec.server.engine import Order
from hf_slospec.server.work import Work

logger = logging.getLogger("ray.serve")
# A request fails once so many replicas died or fell silent while serving it: it may be the cause
MAX_FAULTS = 5
ANSWER_S = 5.0  # seconds for a replica to return its metrics
AGAIN_S = 0.5  # seconds between retries while all queues are full, or all replicas have failed
# Seconds to wait while all replicas are silent; then requests are offered to silent ones
PATIENCE_S = 120.0


class ReplicatedEngine:
    """A ``ServedEngine`` of the HTTP application whose requests are decoded by replicas."""

    def __init__(
        self,
        handle: DeploymentHandle,
        description: Description,
        running: Callable[[], Sequence[str]],
        options: ReplicaOptions,
        work: Work | None = None,
    ):
        """Create an engine on the handle of the :class:`ModelReplica` deployment; ``running()``
        returns the names of the running replicas.
        """
        self.handle = handle
        self.streams = handle.options(stream=True)
        self.options = options
        self.directory = ReplicaDirectory(running, options.silent_s)
        self.tokenizer = description.tokenizer
        self.generation_config = description.generation_config
        self.vocab_size = description.vocab_size
        self.max_len = description.max_len
        # replicas take no images
        self.processor = None
        self.work = work or Work()
        self.response_template = description.response_template
        self._max_nodes = description.max_nodes
        self.name = uuid.uuid4().hex[:12]
        self.offer_numbers = itertools.count()
        self.turns = itertools.count()

    async def watch(self) -> None:
        await self.directory.watch(self.streams, self.name)

    async def submit(self, order: Order) -> ReplicatedDecoding:
        """Return the request once a replica has taken it.

        Raises:
            QueueFull: the queues of all replicas are full.
            NotGuaranteedError: no replica guaranteed its SLOs, and ``backup`` is "decline".
            NotRunningError: ``MAX_FAULTS`` replicas failed while they served it.
        """
        if order.arguments.get("seed") is None and order.arguments.get("do_sample"):
            seed = uuid.uuid4().int % 2**63  # a replica that resumes it draws the same noise
            order = replace(order, arguments=order.arguments | {"seed": seed})
        decoding = ReplicatedDecoding(self, order, self._need(order))
        try:
            await decoding.begin()
        except BaseException:
            decoding.cancel()
            raise
        return decoding

    def _need(self, order: Order) -> Need:
        arguments = order.arguments
        # Only the SLOs matter here: `until` texts, which are slow to prepare, are not compiled, and
        # the replica warns.
        slo = parse_slo(arguments.get("slo_tpot"), lambda text: lambda tokens: False, warns=False)
        (stages,) = slo if isinstance(slo, list) else (slo,)
        SubmitOptions.of(**{name: arguments.get(name) for name in ("slo_ttft", "slo_e2e")})
        params = RequestParams(
            order.prompt, arguments["max_new_tokens"], stages, stages[0].ttft_slo_s or arguments.get("slo_ttft"),
            e2e_slo_s=arguments.get("slo_e2e"),
        )  # fmt: skip
        request = Request(0, params)
        kv_tokens = params.max_len + self._max_nodes
        return Need(
            request.prompt_len, kv_tokens, tightest_tpot_slo_s(request), first_token_slo_s(request)
        )

    async def families(self, prefix: str) -> list[Any]:
        """Return the metric families of all live replicas; samples have the label ``replica``."""
        names = sorted(self.directory.alive())
        per_replica = await asyncio.gather(*(self._families_of(name, prefix) for name in names))
        return merged(dict(zip(names, per_replica, strict=True)))

    async def _families_of(self, replica: str, prefix: str) -> list[Any]:
        response = call(self.handle.families, ToReplica(replica), prefix)
        try:
            async with asyncio.timeout(ANSWER_S):
                families: list[Any] = await response
        except (TimeoutError, *FAULTS) as error:  # the replica has ended, or hangs
            logger.warning("no metrics of replica %s: %r", replica, error)
            response.cancel()
            return []
        return families

    def check_running(self) -> None:
        if not self.directory.running():
            raise NotRunningError("no replica runs; they may be starting, retry later")


class ReplicatedDecoding:
    """A request that a replica decodes; if that dies or falls silent, another one resumes it."""

    finish_reason: FinishReason | None = None
    replica: str | None = None  # name of the replica that serves the request now

    def __init__(self, engine: ReplicatedEngine, order: Order, need: Need):
        self._engine = engine
        self._order = order
        self._need = need
        self._stream: Any = None
        self._offer: Offer | None = None  # the offer that the stream answers
        self._is_cancelled = False
        self._begun_s = time.monotonic()
        self._first_token_s = math.nan
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.metrics: RequestMetrics = Request(0, RequestParams(order.prompt, 0)).metrics()
        self.num_faults = 0  # replicas that died or fell silent while they served the request
        self._turn = next(engine.turns)

    async def begin(self) -> None:
        """Send an offer of the request to one replica after the other until one takes it.

        First, replicas are asked to guarantee the SLOs: each one once, at most ``max_hops`` more
        than the first. Then they only need room in their queue. If a replica does not answer in
        time, the next one is asked.

        Raises:
            QueueFull: the queues of all replicas are full.
            NotGuaranteedError: none guaranteed the SLOs, and ``backup`` is "decline".
        """
        options = self._engine.options
        may_decline = self._has_choice and options.backup == "decline" and self.replica is None
        declined = list[str]()
        full = set[str]()
        late = set[str]()
        while True:
            usable = await self._usable_replicas()
            if full >= usable:
                raise QueueFull(
                    "all replicas have as many waiting requests as they may have; retry later"
                )
            is_last = usable <= {*declined} or (
                options.max_hops is not None and len(declined) > options.max_hops
            )
            if may_decline and is_last:
                raise NotGuaranteedError(
                    f"none of {len(declined)} replicas can guarantee the SLOs now; retry later"
                )
            must_guarantee = self._has_choice and not is_last and (may_decline or len(usable) > 1)
            asked = late | ({*declined} if must_guarantee else full)
            offer = self._offer_to(usable - asked or usable - full, must_guarantee, declined)
            match await self._answer_to(offer, full | late):
                case Taken(replica):
                    self.replica = replica
                    return
                case Declined(replica, is_full):
                    declined.append(replica)
                    full |= {replica} if is_full else set()
                case Broken(replica, reason):
                    self._count_fault(replica, reason)
                case Failed(error):
                    raise error
                case None:
                    declined.append(offer.replica)
                    late.add(offer.replica)

    def _offer_to(
        self, names: AbstractSet[str], must_guarantee: bool, declined: Sequence[str]
    ) -> Offer:
        """Return an offer of the request to one of the named replicas, chosen by ``routing``.

        Args:
            declined: names of the replicas that declined the request, the most recent one last.
        """
        order = self._order
        directory = self._engine.directory
        if self.prompt_logprobs:  # already sent by a replica that failed
            order = replace(order, arguments=order.arguments | {"prompt_logprobs": None})
        number = next(self._engine.offer_numbers)
        offer = Offer(
            "", order, self._need, self._progress, self._engine.name, number, must_guarantee
        )
        if self._engine.options.routing == "guarantees":
            return replace(offer, replica=directory.in_order(names, offer)[0])
        if declined and declined[-1] in names:  # no hops left
            return replace(offer, replica=declined[-1])
        running = sorted({*directory.running()} | names)
        turn = self._turn % len(running)
        return replace(
            offer, replica=next(name for name in running[turn:] + running[:turn] if name in names)
        )

    async def _answer_to(self, offer: Offer, asked: AbstractSet[str]) -> Answer | None:
        """Send an offer and return its answer; None if the answer is late, and another live replica
        that is not in ``asked`` can be tried.
        """
        self._check_wanted()
        directory = self._engine.directory
        self._stream = call(self._engine.streams.decode, offer)
        self._offer = offer
        directory.add_sent(offer)
        answer = None
        try:
            answer = await self._next_answer(offer.replica, asked)
        finally:
            if not isinstance(answer, Taken):
                directory.remove_sent(offer.number)
        if isinstance(answer, Taken):
            directory.record_taken(answer.replica, offer)
        return answer

    async def _next_answer(
        self, replica: str, asked: AbstractSet[str] = frozenset()
    ) -> Answer | None:
        """Return the next answer of the stream; None if none comes within ``silent_s``, and another
        live replica can be tried.

        After twice that time, return None even if only this replica is alive: its stream is broken.

        Args:
            asked: names of replicas that cannot take the request.
        """
        directory = self._engine.directory
        expiries = itertools.count()

        def may_give_up() -> bool:
            return bool(directory.alive() - asked - (set() if next(expiries) else {replica}))

        answer: Answer | None
        try:
            answer = await next_within(self._stream, directory.silent_s, may_give_up)
        except FAULTS as error:  # the replica may live: the network can break a call
            answer = Broken(replica, repr(error))
        if answer is None or isinstance(answer, Broken):
            self._leave()
        return answer

    def _leave(self) -> None:
        """Cancel the current call to the replica, and drop what it still sends."""
        assert self._offer is not None
        self._stream.cancel()
        self._engine.directory.leave(self._offer.replica, self._offer.number)

    async def _usable_replicas(self) -> set[str]:
        """Return the live replicas. If there are none, wait; return silent ones after a while."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + PATIENCE_S
        while True:
            self._check_wanted()
            alive = self._engine.directory.alive()
            running = {*self._engine.directory.running()}
            if alive or (running and now_s() > until_s):
                return alive or running
            await asyncio.sleep(AGAIN_S)

    @property
    def _has_choice(self) -> bool:
        """Return True if replicas may decline the request because its SLOs cannot be guaranteed."""
        return self._need.has_slo and not self._order.arguments.get("best_effort")

    async def _resume(self) -> None:
        """Continue the request on another replica; wait while all queues are full, as a request
        that has begun must not fail.
        """
        while True:
            try:
                await self.begin()
                return
            except QueueFull:
                await asyncio.sleep(AGAIN_S)

    @property
    def _progress(self) -> Progress:
        now_s = time.monotonic()
        metrics = self.metrics
        decoding_s = now_s - self._first_token_s if self.tokens else 0.0
        elapsed_s = max(now_s - self._begun_s, decoding_s)
        return Progress(
            self.tokens.copy(), elapsed_s, decoding_s, metrics.drafted, metrics.acceptance_histogram
        )

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        while self.finish_reason is None:
            replica = self.replica or ""
            answer = await self._next_answer(replica)
            if answer is None or isinstance(answer, Broken):
                silent_s = self._engine.options.silent_s
                reason = answer.reason if answer else f"it has sent nothing for {silent_s:g} s"
                self._count_fault(replica, reason)
                await self._resume()
                name = self._order.request_id
                logger.info(
                    "%s goes on on replica %s after %d tokens", name, self.replica, len(self.tokens)
                )
                continue
            if isinstance(answer, Alive):
                continue
            if isinstance(answer, Failed):
                raise answer.error
            assert isinstance(answer, Update)
            if answer.tokens and not self.tokens:
                self._first_token_s = time.monotonic()
            self.tokens += answer.tokens
            self.logprobs += answer.logprobs
            self.prompt_logprobs = self.prompt_logprobs or answer.prompt_logprobs
            self.metrics = answer.metrics
            self.finish_reason = answer.finish_reason
            yield answer.tokens, self.finish_reason is not None

    def _count_fault(self, replica: str, reason: str) -> None:
        """Count a replica that died or fell silent while it served the request.

        Raises:
            RequestCancelledError: no replica failed; the request was cancelled.
            NotRunningError: ``MAX_FAULTS`` replicas have failed.
        """
        self._check_wanted()
        name = self._order.request_id
        logger.warning(
            "replica %s failed after %d tokens of %s: %s", replica, len(self.tokens), name, reason
        )
        self._engine.directory.set_silent(replica, reason)
        self.num_faults += 1
        if self.num_faults >= MAX_FAULTS:
            raise NotRunningError(
                f"{self.num_faults} replicas failed while they decoded this request; see their logs"
            )

    def _check_wanted(self) -> None:
        if self._is_cancelled:
            raise RequestCancelledError(f"request {self._order.request_id} was cancelled")

    def cancel(self) -> None:
        if self._stream is not None and self.finish_reason is None:
            self._is_cancelled = True
            self._leave()


def merged(families: dict[str, list[Any]]) -> list[Any]:
    """Return metric families by replica as one list; samples get the label ``replica``."""
    by_name: dict[str, Any] = {}
    for replica, of_replica in families.items():
        for family in with_labels(of_replica, replica=replica):
            if family.name in by_name:
                by_name[family.name].samples += family.samples
            else:
                by_name[family.name] = family
    return list(by_name.values())
