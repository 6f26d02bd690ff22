"""Failover: an engine that offers requests to replicas, and resumes those of replicas that die on other ones."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from hf_slospec.algo.replica_ranking import Need
from hf_slospec.engine.request import FinishReason, Progress, Request, RequestMetrics, RequestParams, Stage
from hf_slospec.engine.scheduling.guarantees import first_token_slo_s, tightest_tpot_slo_s
from hf_slospec.errors import NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.generate.slo import SLOStage, parse_slo
from hf_slospec.models.sampling import TokenLogprobs
from hf_slospec.replicas.messages import Broken, Declined, Description, Failed, Offer, Taken, ToReplica, Update
from hf_slospec.serving.openai.engine import Order
from hf_slospec.serving.openai.work import Work
from hf_slospec.serving.telemetry import with_labels

logger = logging.getLogger("ray.serve")
FAULTS = (RayError, RayServeException, StopAsyncIteration)  # a replica died, or there is none
MAX_FAULTS = 5  # replicas that may die while they serve a request; one that kills them must not kill all
ANSWER_S = 5.0  # seconds for a replica to return its metrics
AGAIN_S = 0.5  # seconds between retries while all queues are full, or all replicas have failed
PATIENCE_S = 120.0  # seconds to wait for a replica that has not failed, before failed ones are asked again


class ReplicatedEngine:
    """Engine of the HTTP application whose requests replicas decode."""

    def __init__(
        self,
        handle: DeploymentHandle,
        description: Description,
        running: Callable[[], Sequence[str]],
        work: Work | None = None,
    ):
        """Take the handle of the :class:`ModelReplica` deployment; ``running()`` names the running replicas."""
        self.handle, self.streams, self.running = handle, handle.options(stream=True), running
        self.tokenizer, self.generation_config = description.tokenizer, description.generation_config
        self.vocab_size, self.max_len = description.vocab_size, description.max_len
        self.processor, self.work = None, work or Work()  # replicas take no images
        self.response_template, self._max_nodes = description.response_template, description.max_nodes
        self.name = uuid.uuid4().hex[:12]
        self.offer_numbers = itertools.count()

    async def submit(self, order: Order) -> ReplicatedDecoding:
        """Return the request, once a replica serves it.

        Raises:
            QueueFull: all replicas have as many waiting requests as they may have.
            NotRunningError: too many replicas died while they served it.
        """
        decoding = ReplicatedDecoding(self, _seeded(order), self._need(order))
        try:
            await decoding.begin()
        except BaseException:
            decoding.cancel()
            raise
        return decoding

    def _need(self, order: Order) -> Need:
        arguments = order.arguments
        # How stages end does not matter here, and texts that end them take long to prepare.
        slo = parse_slo(arguments.get("slo_tpot"))
        (row,) = slo if isinstance(slo, list) else (slo,)
        asked = row if isinstance(row, tuple) else (SLOStage(slo_tpot=row),)
        stages = tuple(Stage(stage.slo_tpot, ttft_slo_s=stage.slo_ttft) for stage in asked)
        params = RequestParams(
            order.prompt, arguments["max_new_tokens"], stages, stages[0].ttft_slo_s or arguments.get("slo_ttft"),
            e2e_slo_s=arguments.get("slo_e2e"),
        )  # fmt: skip
        request, kv_tokens = Request(0, params), params.max_len + self._max_nodes
        return Need(request.prompt_len, kv_tokens, tightest_tpot_slo_s(request), first_token_slo_s(request))

    async def families(self, prefix: str) -> list[Any]:
        """Return the metric families of all replicas, their samples labelled with the replica."""
        names = self.running()
        per_replica = await asyncio.gather(*(self._families_of(name, prefix) for name in names))
        return merged(dict(zip(names, per_replica, strict=True)))

    async def _families_of(self, replica: str, prefix: str) -> list[Any]:
        response = _call(self.handle.families, ToReplica(replica), prefix)
        try:
            async with asyncio.timeout(ANSWER_S):
                families: list[Any] = await response
        except (TimeoutError, *FAULTS) as error:  # it has just ended, or hangs
            logger.warning("no metrics of replica %s: %r", replica, error)
            response.cancel()
            return []
        return families

    def check_running(self) -> None:
        """Raise NotRunningError unless a replica runs."""
        if not self.running():
            raise NotRunningError("no replica runs; they may be starting, retry later")


class ReplicatedDecoding:
    """A request that replicas decode, one after the other if they die."""

    finish_reason: FinishReason | None = None
    replica: str | None = None  # name of the replica that serves the request now

    def __init__(self, engine: ReplicatedEngine, order: Order, need: Need):
        self._engine, self._order, self._need = engine, order, need
        self._stream: Any = None
        self._is_cancelled = False
        self._begun_s, self._first_token_s = time.monotonic(), math.nan
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.metrics: RequestMetrics = Request(0, RequestParams(order.prompt, 0)).metrics()
        self.num_faults = 0  # replicas that died while they served the request
        self._failed = set[str]()  # names of these replicas, as far as known

    async def begin(self) -> None:
        """Send offers of the request to replicas, until one takes it.

        First, each replica is asked once whether it guarantees the SLOs; then for room in its queue only.

        Raises:
            QueueFull: no replica has room.
        """
        declined, full = set[str](), set[str]()
        while True:
            running = await self._usable_replicas()
            if running and full >= running:
                raise QueueFull("all replicas have as many waiting requests as they may have; retry later")
            must_guarantee = self._has_choice and len(running) > 1 and not declined >= running
            answer = await self._answer_to(frozenset(declined if must_guarantee else full), must_guarantee)
            match answer:
                case Taken(replica):
                    self.replica = replica
                    return
                case Declined(replica, is_full):
                    declined.add(replica)
                    full |= {replica} if is_full else set()
                case Broken(replica, reason):
                    self._count_fault(replica, reason)
                case Failed(error):
                    raise error

    async def _answer_to(self, declined: frozenset[str], must_guarantee: bool) -> Any:
        """Return the answer to an offer; None if the replica died instead."""
        self._check_wanted()
        order = self._order
        if self.prompt_logprobs:  # already computed by a replica that died
            order = replace(order, arguments=order.arguments | {"prompt_logprobs": None})
        offer = Offer(
            order, self._need, self._progress, self._engine.name, next(self._engine.offer_numbers), declined,
            frozenset(self._failed), must_guarantee,
        )  # fmt: skip
        self._stream = _call(self._engine.streams.decode, offer)
        try:
            return await _next(self._stream)
        except FAULTS as error:
            self._count_fault(None, repr(error))
            return None

    async def _usable_replicas(self) -> set[str]:
        """Return the running replicas that have not died with this request; if all have, wait for new ones."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            running = {*self._engine.running()}
            usable = running - self._failed
            if usable or not running or time.monotonic() > until_s:
                return usable or running
            await asyncio.sleep(AGAIN_S)

    @property
    def _has_choice(self) -> bool:
        """Return True if replicas may decline the request because they cannot guarantee its SLOs."""
        return self._need.has_slo and not self._order.arguments.get("best_effort")

    async def _resume(self) -> None:
        """Send the request to another replica; wait while all are full, as a request that has begun must not fail."""
        while True:
            try:
                await self.begin()
                return
            except QueueFull:
                await asyncio.sleep(AGAIN_S)

    @property
    def _progress(self) -> Progress:
        now_s, metrics = time.monotonic(), self.metrics
        decoding_s = now_s - self._first_token_s if self.tokens else 0.0
        elapsed_s = max(now_s - self._begun_s, decoding_s)
        return Progress(self.tokens.copy(), elapsed_s, decoding_s, metrics.drafted, metrics.acceptance_histogram)

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        """Yield newly committed tokens, and whether they are the last."""
        while self.finish_reason is None:
            try:
                answer = await _next(self._stream)
            except FAULTS as error:
                answer = Broken(self.replica or "", repr(error))
            if isinstance(answer, Broken):
                self._count_fault(self.replica, answer.reason)
                await self._resume()
                name = self._order.request_id
                logger.info("%s goes on on replica %s after %d tokens", name, self.replica, len(self.tokens))
                continue
            if isinstance(answer, Failed):
                raise answer.error
            assert isinstance(answer, Update)
            if answer.tokens and not self.tokens:
                self._first_token_s = time.monotonic()
            self.tokens += answer.tokens
            self.logprobs += answer.logprobs
            self.prompt_logprobs = self.prompt_logprobs or answer.prompt_logprobs
            self.metrics, self.finish_reason = answer.metrics, answer.finish_reason
            yield answer.tokens, self.finish_reason is not None

    def _count_fault(self, replica: str | None, reason: str) -> None:
        """Count a replica that died while it served the request; ``replica`` is its name, if known.

        Raises:
            RequestCancelledError: no replica died; the request was cancelled.
            NotRunningError: ``MAX_FAULTS`` replicas died.
        """
        self._check_wanted()
        name = self._order.request_id
        logger.warning("replica %s failed after %d tokens of %s: %s", replica, len(self.tokens), name, reason)
        self._failed |= set() if replica is None else {replica}
        self.num_faults += 1
        if self.num_faults >= MAX_FAULTS:
            raise NotRunningError(f"{self.num_faults} replicas failed while they decoded this request; see their logs")

    def _check_wanted(self) -> None:
        if self._is_cancelled:
            raise RequestCancelledError(f"request {self._order.request_id} was cancelled")

    def cancel(self) -> None:
        """Cancel the request, unless it is done."""
        if self._stream is not None and self.finish_reason is None:
            self._is_cancelled = True
            self._stream.cancel()


def _call(method: Any, *arguments: Any) -> Any:
    """Return the response of a replica's method, called under a new request id.

    Serve gives all calls made for one HTTP request the same id, and its routers confuse those under way at once.
    """
    return contextvars.Context().run(method.remote, *arguments)


async def _next(stream: Any) -> Any:
    """Return the next answer of a stream. Serve turns a task's cancellation into another error; raise the original."""
    try:
        return await anext(stream)
    except serve.exceptions.RequestCancelledError as error:
        raise asyncio.CancelledError from error


def _seeded(order: Order) -> Order:
    """Return the order with a seed if it samples, so that another replica draws the same noise."""
    if order.arguments.get("seed") is None and order.arguments.get("do_sample"):
        return replace(order, arguments=order.arguments | {"seed": uuid.uuid4().int % 2**63})
    return order


def merged(families: dict[str, list[Any]]) -> list[Any]:
    """Return the metric families of replicas as one list, their samples labelled with the replica."""
    by_name: dict[str, Any] = {}
    for replica, of_replica in families.items():
        for family in with_labels(of_replica, replica=replica):
            if family.name in by_name:
                by_name[family.name].samples += family.samples
            else:
                by_name[family.name] = family
    return list(by_name.values())
