"""One replica: a generator with its batcher, in a separate process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import torch
from ray import serve

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.errors import NotGuaranteedError, NotRunningError, QueueFull, SLOSpecError
from hf_slospec.replicas.messages import (
    REPORT_S,
    Alive,
    Answer,
    Broken,
    Declined,
    Description,
    Failed,
    Offer,
    Report,
    Taken,
    ToReplica,
    Update,
    keep_replica_on_loopback,
)
from hf_slospec.replicas.options import ReplicaOptions, names_of_fields
from hf_slospec.scheduler.load import utilisation
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.loading import load_generator
from hf_slospec.server.serve import SWITCH_S

# Serve's handlers add the names of the replica and the request to each line
logger = logging.getLogger("ray.serve")
# Reports per call of `reports`. The number is limited because a replica that is to stop waits for
# all calls, also for those of fronts that died.
NUM_REPORTS = 20
ORPHAN_S = 60.0  # seconds after which a replica that neither Serve nor a front calls ends itself
TICK_S = 5.0  # seconds between checks whether a replica must end itself
MAX_LEFT = 1000  # cancelled offers that are remembered, as their calls may still arrive
RECENT_S = 60.0  # requests that ended longer ago, in seconds, do not count for autoscaling


class ModelReplica:
    """Deployment that holds the models and decodes. Fronts and Serve call its methods."""

    def __init__(self, options: ReplicaOptions):
        """Load the models, measure their latencies, and start the batcher."""
        sys.setswitchinterval(SWITCH_S)
        keep_replica_on_loopback()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.options = options
        with names_of_fields():
            self.generator = load_generator(options, options.config, options.chat_template).start()
        logger.info("%s with drafts by %s", options.name, self.generator.draft_method.kind)
        self.engine = LocalEngine(self.generator, options.response_template)
        self.name = _own_name()
        self._num_unhealthy = 0  # health checks that failed
        self._num_ticks = 0  # ticks of TICK_S since Serve or a front last called the replica
        # by sender and number of the offer; None until the request is submitted
        self._handles: dict[tuple[str, int], RequestHandle | None] = {}
        # sender and number of the last offers that fronts have cancelled
        self._left: deque[tuple[str, int]] = deque(maxlen=MAX_LEFT)
        self._seen: dict[str, int] = {}  # by sender: number of the last offer taken or declined
        # requests with SLOs: time of the end in seconds, is_missed
        self._recent: deque[tuple[float, bool]] = deque()
        _end_when_orphaned(self)

    # ---- for the front

    def describe(self, address: None) -> Description:
        engine = self.engine
        return Description(
            engine.tokenizer, engine.generation_config, engine.vocab_size, engine.max_len,
            self.generator.max_nodes, engine.response_template,
        )  # fmt: skip

    async def decode(self, offer: Offer) -> AsyncIterator[Answer]:
        """Yield the answer to an offer and, if it is taken, the output as it is committed."""
        arguments = offer.order.arguments | {
            "resume": offer.progress,
            "must_guarantee": offer.must_guarantee,
        }
        order = replace(offer.order, arguments=arguments)
        key = (offer.sender, offer.number)
        if key in self._left:  # cancelled before this call arrived
            return
        handle = self._handles[key] = None
        try:
            handle = await self.engine.submit(order)
            if key in self._left:
                handle.cancel()
            else:
                self._handles[key] = handle
            is_guaranteed = await handle.aguaranteed()
            self._record(offer)
            logger.info("%s %s", order.request_id, "guaranteed" if is_guaranteed else "taken")
            yield Taken(self.name)
            updates = _updates(handle, len(offer.progress.tokens))
            async with aclosing(_with_signs_of_life(updates, self.options.silent_s / 4)) as answers:
                async for answer in answers:
                    yield answer
            if offer.need.has_slo:
                self._recent.append(
                    (time.monotonic(), not handle.metrics.guaranteed or not handle.metrics.attained)
                )
                self._forget_old()
        except (NotGuaranteedError, QueueFull) as error:
            self._record(offer)
            logger.info("%s declined: %s", order.request_id, error)
            yield Declined(self.name, isinstance(error, QueueFull))
        except Exception as error:  # noqa: BLE001  the request's error, unless the replica has failed
            fault = self._fault()
            yield Failed(_sendable(error)) if fault is None else Broken(self.name, str(fault))
        finally:
            self._handles.pop(key, None)
            if handle is not None:
                handle.cancel()  # the front has closed the stream, unless the request is over
                logger.info("%s ended: %s", order.request_id, handle.finish_reason or "cancelled")

    def families(self, address: ToReplica, prefix: str) -> list[Any]:
        return list(self.generator.collector(prefix).collect())

    def _fault(self) -> NotRunningError | None:
        """Return the error with which the batcher refuses requests; None if it runs."""
        try:
            self.generator.check_running()
        except NotRunningError as error:
            return error
        return None

    def _record(self, offer: Offer) -> None:
        self._seen[offer.sender] = max(offer.number, self._seen.get(offer.sender, -1))

    async def reports(
        self, address: ToReplica, sender: str, left: Collection[int]
    ) -> AsyncIterator[Report | Alive]:
        """Yield a report every ``REPORT_S`` seconds, or ``Alive`` during a long step; end after
        ``NUM_REPORTS`` of them.

        Args:
            sender: name of the front that calls.
            left: numbers of this front's offers to cancel, with their requests.
        """
        self._num_ticks = 0
        for number in left:
            self._left.append((sender, number))
            handle = self._handles.pop((sender, number), None)
            if handle is not None:
                handle.cancel()
        report = asyncio.ensure_future(self._report())
        try:
            for _ in range(NUM_REPORTS):
                await asyncio.wait({report}, timeout=REPORT_S)
                if not report.done():
                    yield Alive()
                    continue
                yield report.result()
                await asyncio.sleep(REPORT_S)
                report = asyncio.ensure_future(self._report())
        finally:
            report.cancel()

    async def _report(self) -> Report:
        seen = dict(self._seen)
        return Report(self.name, await self.generator.aload(), seen)

    # ---- for Serve

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the gauges from which ``wanted_replicas`` computes the number of replicas."""
        stats = self.generator.stats()
        load = await self.generator.aload()
        self._forget_old()
        num_missed = sum(is_missed for _, is_missed in self._recent)
        max_batch = self.options.config.max_batch
        return {
            "missed": num_missed / max(len(self._recent), 1),
            "waiting": stats.waiting / max_batch,
            "utilisation": max(
                utilisation(load), stats.kv_tokens / stats.kv_limit, stats.running / max_batch
            ),
        }

    def _forget_old(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - RECENT_S:
            self._recent.popleft()

    def is_wanted_after_tick(self) -> bool:
        """Count a tick, and return False if the replica has no requests and neither Serve nor a
        front has called it for ``ORPHAN_S`` seconds.

        Ticks are counted because the clock goes on while the process is suspended, and calls of
        that time are handled only afterwards."""
        self._num_ticks = 0 if self._handles else self._num_ticks + 1
        return self._num_ticks * TICK_S <= ORPHAN_S

    def check_health(self) -> None:
        """Raise NotRunningError if the batcher has died, or a step takes longer than ``hang_s``.

        At the second failed check the process exits, so that other replicas resume its requests at
        once. Serve would first wait ``drain_s`` seconds for the requests, which cannot finish.
        """
        self._num_ticks = 0
        try:
            self.generator.check_running(self.options.hang_s)
        except NotRunningError as error:
            logger.error("unhealthy: %s", error)
            self._num_unhealthy += 1
            if self._num_unhealthy > 1:
                _end_process()
            raise


def _end_when_orphaned(replica: ModelReplica) -> None:
    """Start a thread that ends the process once the replica has no requests and is not called.

    Serve stops a replica that it cannot reach, but its message to end the process may be lost, too.
    The process would then run forever and keep its CPUs and GPUs.
    """

    def watch() -> None:
        while replica.is_wanted_after_tick():
            time.sleep(TICK_S)
        logger.error(
            "neither Serve nor a front has asked for this replica for %g s; the process ends",
            ORPHAN_S,
        )
        _end_process()

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()


async def _with_signs_of_life(
    updates: AsyncIterator[Update], pause_s: float
) -> AsyncGenerator[Update | Alive]:
    """Yield the updates, and ``Alive`` whenever none has come for ``pause_s`` seconds."""
    update = asyncio.ensure_future(anext(updates, None))
    try:
        while True:
            await asyncio.wait({update}, timeout=pause_s)
            if not update.done():
                yield Alive()
                continue
            answer = update.result()
            if answer is None:
                return
            yield answer
            update = asyncio.ensure_future(anext(updates, None))
    finally:
        update.cancel()


async def _updates(handle: RequestHandle, num_known: int) -> AsyncIterator[Update]:
    """Yield a request's output as it is committed, without the first ``num_known`` tokens, which
    the front has already.
    """
    num_tokens = 0
    is_first = True
    async for tokens, is_last in handle.asteps():
        new = tokens[max(num_known - num_tokens, 0) :]
        num_tokens += len(tokens)
        is_whole = handle.finish_reason in (
            "stop",
            "length",
        )  # otherwise asteps raises an error next
        if new or is_whole:
            reason = handle.finish_reason if is_last and is_whole else None
            of_prompt = handle.prompt_logprobs if is_first else ()
            yield Update(
                new,
                handle.logprobs[num_tokens - len(new) : num_tokens],
                handle.metrics,
                reason,
                of_prompt,
            )
            is_first = False


def _end_process() -> None:
    os._exit(1)


def _own_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if the receiver may lack its class."""
    is_known = isinstance(error, SLOSpecError) or type(error).__module__ == "builtins"
    return error if is_known else RuntimeError(f"{type(error).__name__}: {error}")
