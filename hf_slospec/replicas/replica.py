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

logger = logging.getLogger("ray.serve")  # its handlers add the replica and the request to each line
# In one call; a replica that is to end waits for its calls, also for those of fronts that died
NUM_REPORTS = 20
# seconds after which a replica that is not asked for ends itself; between checks of this
ORPHAN_S = 60.0
TICK_S = 5.0
MAX_LEFT = 1000  # offers that were left and are remembered, as their calls may still arrive
RECENT_S = 60.0  # seconds in which missed SLOs are counted


class ModelReplica:
    """Deployment of the models. Its methods are called by the front and by Serve."""

    def __init__(self, options: ReplicaOptions):
        """Load the models, measure them, and start the batcher."""
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
        self._num_ticks = 0  # since Serve or a front has asked for the replica
        self._handles: dict[
            tuple[str, int], RequestHandle | None
        ] = {}  # by sender and number of the offer
        # Sender and number of the last offers that fronts have left.
        self._left: deque[tuple[str, int]] = deque(maxlen=MAX_LEFT)
        self._seen: dict[str, int] = {}  # by sender, the number of the last offer taken or declined
        self._recent: deque[tuple[float, bool]] = (
            deque()
        )  # requests with SLOs: end in seconds, is_missed
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
        if key in self._left:  # the call arrives after the report of its end
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
        """Return the error that keeps requests from being taken; None if they are."""
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
        """Yield a report twice a second, for some time; during a long step only a sign of life.

        Args:
            left: numbers of offers of ``sender`` that are to be dropped, with their requests.
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
        """Return the gauges that the autoscaling policy decides by."""
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
        """Count ``TICK_S`` seconds, and return False if the replica is idle and was not asked for
        ``ORPHAN_S``.

        Ticks are counted, not seconds, as a process that stood still finds the questions of that
        time afterwards."""
        self._num_ticks = 0 if self._handles else self._num_ticks + 1
        return self._num_ticks * TICK_S <= ORPHAN_S

    def check_health(self) -> None:
        """Raise NotRunningError if the batcher has died, or one of its steps takes longer than
        ``hang_s``.

        The process exits at the second failed check, so that other replicas resume its requests at
        once: Serve would first wait ``drain_s`` for them to finish, which they cannot.
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
    """Start a thread that ends the process once the replica has no requests and is not asked for.

    Serve stops a replica that it cannot reach, but its order to end the process can be lost on the
    way. The process would go on for ever and keep its CPUs and GPUs.
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
    """Yield the updates, and a sign of life whenever there has been none for ``pause_s``."""
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
    """Yield a request's output as it is committed, without the first ``num_known`` tokens."""
    num_tokens = 0
    is_first = True
    async for tokens, is_last in handle.asteps():
        new = tokens[max(num_known - num_tokens, 0) :]
        num_tokens += len(tokens)
        is_whole = handle.finish_reason in ("stop", "length")  # otherwise an error follows
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
    """Return the error, or one with the same text if the receiver may not know its class."""
    is_known = isinstance(error, SLOSpecError) or type(error).__module__ == "builtins"
    return error if is_known else RuntimeError(f"{type(error).__name__}: {error}")
