"""Thread pool for the preparation of requests, such as tokenizing. Its queue is bounded, clients
share it fairly, and the jobs of clients that disconnect are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from hf_slospec.errors import QueueFull

T = TypeVar("T")


class BusyError(QueueFull):
    """A job is refused because too many jobs are waiting."""


class JobSlots:
    """Limit of concurrent jobs: each job holds a slot. Free slots go to waiting clients in
    round-robin order, so that many jobs of one client hardly delay other clients.

    If too many jobs wait, the last job of the client with most waiting jobs is refused. All calls
    must come from one event loop.
    """

    def __init__(self, num_slots: int, max_waiting: int):
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self.num_running = self.num_waiting = 0
        # jobs so far: refused as too many waited, dropped as the client disconnected
        self.num_refused = self.num_dropped = 0
        # waiting jobs by client; the first client in the dict gets the next slot
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it inside the context; raises BusyError."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, client: str) -> None:
        """Wait for a slot, which :meth:`leave` releases; raises BusyError."""
        if self.num_running < self.num_slots:  # then no client waits
            self.num_running += 1
            return
        if self.num_waiting >= self.max_waiting:
            self._refuse_last(client)
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(slot)
        self.num_waiting += 1
        try:
            await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._remove(client, slot)
                self.num_dropped += 1
            elif slot.exception() is None:  # the job got the slot before it could be cancelled
                self.leave()
            raise

    def leave(self) -> None:
        """Release a slot, and give it to a job of the next waiting client."""
        self.num_running -= 1
        while self._waiting:
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            slot = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # as the last client of the round
            self.num_waiting -= 1
            # the job may have been cancelled in this turn of the event loop
            if not slot.cancelled():
                self.num_running += 1
                slot.set_result(None)
                return

    def _refuse_last(self, client: str) -> None:
        """Refuse the last job of the client with most waiting jobs; raise BusyError if the new job
        of ``client`` is that job.
        """
        self.num_refused += 1
        error = BusyError("the server has too many requests to prepare; retry later")
        busiest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[busiest]) <= len(self._waiting.get(client, ())) + 1:
            raise error
        slot = self._waiting[busiest][-1]
        self._remove(busiest, slot)
        if not slot.cancelled():
            slot.set_exception(error)

    def _remove(self, client: str, slot: asyncio.Future[None]) -> None:
        if slot not in self._waiting.get(client, ()):
            return  # leave() has already removed it
        self._waiting[client].remove(slot)
        self.num_waiting -= 1
        if not self._waiting[client]:
            del self._waiting[client]


class Work(JobSlots):
    """Thread pool for short jobs: one that runs cannot be stopped."""

    def __init__(self, num_threads: int = 4, max_waiting: int = 256):
        super().__init__(num_threads, max_waiting)
        self._threads = ThreadPoolExecutor(num_threads, "hf_slospec_work")

    async def run(
        self,
        client: str,
        function: Callable[..., T],
        *arguments: Any,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Run a function in a thread of the pool, and return its result.

        Args:
            client: name of the client, for fair scheduling.
            undo: called with the result if the caller is cancelled before it gets the result.

        Raises:
            BusyError: too many jobs wait.
        """
        await self.enter(client)
        job = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(function, *arguments)
        )
        job.add_done_callback(lambda _: self.leave())
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(partial(_undo, undo))
            raise


def _undo(undo: Callable[[T], None] | None, job: asyncio.Future[T]) -> None:
    if not job.cancelled() and job.exception() is None and undo is not None:
        undo(job.result())
