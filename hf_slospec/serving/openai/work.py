"""Work for requests before the engine takes them: bounded, in turns of clients, dropped when its client leaves."""

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
    """Too many jobs are waiting."""


class Turns:
    """A number of places for jobs, which clients get in turns. Belongs to one event loop.

    A client with many jobs waits for its own ones, and not the others for it. Where too many jobs wait, the last one of
    the client with the most is refused.
    """

    def __init__(self, num_places: int, max_waiting: int):
        self.num_places, self.max_waiting = num_places, max_waiting
        self.num_running = self.num_waiting = 0
        self.num_refused = self.num_dropped = 0  # jobs so far: for lack of room, and because the client left
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the one whose turn it is first

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside of the context; raises BusyError."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, client: str) -> None:
        """Wait for a place; raises BusyError."""
        if self.num_running < self.num_places:  # then no client waits
            self.num_running += 1
            return
        if self.num_waiting >= self.max_waiting:
            self._refuse_last(client)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        self.num_waiting += 1
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._remove(client, place)
                self.num_dropped += 1
            elif place.exception() is None:  # it was given at this moment
                self.leave()
            raise

    def leave(self) -> None:
        """Give the place to the next client."""
        self.num_running -= 1
        while self._waiting:
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            place = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind all others
            self.num_waiting -= 1
            if not place.cancelled():  # its client may have left in this very turn of the event loop
                self.num_running += 1
                place.set_result(None)
                return

    def _refuse_last(self, client: str) -> None:
        """Refuse the last job of the client with the most; raise BusyError if that is the new one."""
        self.num_refused += 1
        error = BusyError("the server has too many requests to prepare; retry later")
        greediest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[greediest]) <= len(self._waiting.get(client, ())) + 1:
            raise error
        place = self._waiting[greediest][-1]
        self._remove(greediest, place)
        place.set_exception(error)

    def _remove(self, client: str, place: asyncio.Future[None]) -> None:
        if place not in self._waiting.get(client, ()):
            return  # it was passed over when its turn came
        self._waiting[client].remove(place)
        self.num_waiting -= 1
        if not self._waiting[client]:
            del self._waiting[client]


class Work(Turns):
    """A pool of threads for work whose size is limited: a thread cannot be stopped."""

    def __init__(self, num_threads: int = 4, max_waiting: int = 256):
        super().__init__(num_threads, max_waiting)
        self._threads = ThreadPoolExecutor(num_threads, "hf_slospec_work")

    async def run(
        self, client: str, function: Callable[..., T], *arguments: Any, undo: Callable[[T], None] | None = None
    ) -> T:
        """Return what a function returns in a thread of the pool.

        Args:
            client: whose turn it takes.
            undo: called with the result if the client has left meanwhile.

        Raises:
            BusyError: too many jobs wait.
        """
        await self.enter(client)
        job = asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *arguments))
        job.add_done_callback(lambda _: self.leave())
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(partial(_undo, undo))
            raise


def _undo(undo: Callable[[T], None] | None, job: asyncio.Future[T]) -> None:
    if not job.cancelled() and job.exception() is None and undo is not None:
        undo(job.result())
