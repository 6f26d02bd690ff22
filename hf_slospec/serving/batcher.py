"""The thread that decodes what other threads submit."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler
from hf_slospec.engine.step import Engine
from hf_slospec.errors import NotRunningError, QueueFull
from hf_slospec.serving.handle import RequestHandle

NewEngine = Callable[[ContinuousScheduler], Engine]


class Observer:
    """Hears what a batcher does, in its thread."""

    def on_step(self, step: StepEvent) -> None:
        """After every step."""

    def on_end(self, request: Request) -> None:
        """After a request finished, was cancelled or failed."""


class Batcher:
    """Runs one engine in a thread of its own, while there is something to decode.

    All that other threads do is leave orders behind a lock: requests to add, requests to cancel, to stop. The engine's
    thread takes them between steps, so nothing but that thread touches engine and scheduler.
    """

    def __init__(
        self,
        new_scheduler: Callable[[], ContinuousScheduler],
        new_engine: NewEngine,
        max_queue: int,
        turns: FairLock,
        observer: Observer,
        in_thread: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        """``turns`` is held during every step: others may run the same models in between.

        The batcher's thread runs within ``in_thread()``.
        """
        self.in_thread = in_thread
        self.new_scheduler, self.new_engine, self.max_queue = new_scheduler, new_engine, max_queue
        self.turns, self.observer = turns, observer
        self._clear("has not been started; call start(), or use `with generator:`")

    def _clear(self, why_not: str) -> None:
        self._state = threading.Condition()  # guards the orders below
        self._arrivals: deque[RequestHandle] = deque()
        self._given_up: deque[tuple[RequestHandle, BaseException | None]] = deque()
        self._ending: str | None = None  # "drain": take nothing new; "now": finish nothing
        self._handles: dict[int, RequestHandle] = {}  # of unfinished requests, by index
        self._num_waiting = 0  # in the scheduler
        self.num_running = self.kv_held = 0  # requests, and the slots they may come to hold
        self._thread: threading.Thread | None = None
        self._why_not = why_not
        self._pid = os.getpid()
        self._starting = threading.RLock()

    # ---- for other threads

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._pid == os.getpid()

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""
        return len(self._arrivals) + self._num_waiting

    def start(self) -> None:
        """Begin to take requests; does nothing if it does. Waits for one that is stopping."""
        if self._pid != os.getpid():
            self._clear("")  # a forked child inherits locks that nobody will release
        if self._thread is threading.current_thread():
            if self._is_taking:
                return
            raise NotRunningError("start() was called by the batcher's own thread while it stops; call it from another")
        with self._starting:
            if self._is_taking:
                return
            if self._thread is not None:
                self._thread.join()
            scheduler = self.new_scheduler()
            engine = self.new_engine(scheduler)
            self.turns.rest()  # this thread may have loaded and measured the models
            thread = threading.Thread(target=self._run, args=(engine, scheduler), name="hf_slospec", daemon=True)
            with self._state:
                self._ending, self._thread = None, thread
                thread.start()
            _batchers.add(self)

    def submit(self, handle: RequestHandle, block: bool, timeout: float | None) -> None:
        """Queue a request.

        Raises:
            QueueFull: at once, or with ``block`` after ``timeout`` seconds.
            NotRunningError: the batcher takes no requests.
        """
        self.check_running()
        with self._state:
            may_wait = block and threading.current_thread() is not self._thread  # which makes the room
            is_room = self._state.wait_for(
                lambda: self.num_waiting < self.max_queue or not self._is_taking, timeout if may_wait else 0.0
            )
            self.check_running()
            if not is_room:
                raise QueueFull(
                    f"{self.num_waiting} requests are waiting, which is max_queue; submit with block=True, or later"
                )
            handle.thread = self._thread
            self._arrivals.append(handle)
            self._handles[handle.request.index] = handle
            self._state.notify_all()

    def abort(self, handle: RequestHandle, error: BaseException | None) -> None:
        """Cancel a request, or fail it with an error, before the next step."""
        if self._pid != os.getpid():
            return
        with self._state:
            self._given_up.append((handle, error))
            self._state.notify_all()

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Take no more requests, finish those there are if ``drain``, for ``timeout`` seconds, and cancel the rest."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        if thread is threading.current_thread():
            raise NotRunningError("stop() was called by the batcher's own thread; call it from another one")
        self._end_with("drain" if drain else "now", thread)
        thread.join(timeout if drain else None)
        self._end_with("now", thread)
        thread.join()

    def _end_with(self, ending: str, thread: threading.Thread) -> None:
        with self._state:
            if self._thread is thread and self._ending != "now":  # nobody started it again, or is in more of a hurry
                self._ending, self._why_not = ending, "was stopped; call start() to use it again"
                self._state.notify_all()

    def check_running(self) -> None:
        if self._pid != os.getpid():
            raise NotRunningError("the batcher runs in the process this one was forked from; call start() here")
        if not self._is_taking:
            raise NotRunningError(f"the batcher {self._why_not}")

    @property
    def _is_taking(self) -> bool:
        return self.is_running and self._ending is None

    # ---- the engine's thread

    def _run(self, engine: Engine, scheduler: ContinuousScheduler) -> None:
        error: BaseException | None = None
        try:
            with self.in_thread():
                while self._take_orders(engine, scheduler):
                    if scheduler.running or scheduler.waiting:
                        self._step(engine, scheduler)
                with self.turns:
                    engine.retire([*scheduler.running, *scheduler.waiting])
        except BaseException as caught:  # noqa: BLE001  whoever waits for a request must hear of it
            error = caught
        with self._state:
            if error is not None:
                self._why_not = f"died of {error!r}; call start() to use it again"
            left = list(self._handles.values())
            self._arrivals.clear()
            self._given_up.clear()
            self._num_waiting = self.num_running = self.kv_held = 0
            self._ending = "now"
            self._state.notify_all()
        for handle in left:
            handle.request.end(error)
            self._end(handle.request)

    def _take_orders(self, engine: Engine, scheduler: ContinuousScheduler) -> bool:
        """Wait for something to do.  -> whether to go on"""
        if not (is_busy := bool(scheduler.running or scheduler.waiting)):
            self.turns.rest()
        with self._state:
            self._count(scheduler)
            self._state.wait_for(lambda: is_busy or self._arrivals or self._given_up or self._ending)
            arrivals, self._arrivals = self._arrivals, deque()
            given_up, self._given_up = self._given_up, deque()
            self._num_waiting += len(arrivals)
            ending = self._ending
        for handle in arrivals:
            scheduler.add(handle.request)
        for handle, error in given_up:
            request = handle.request
            if not request.is_finished:
                request.end(error)
                with self.turns:
                    engine.retire([request])
                self._end(request)
        return ending != "now" and not (ending == "drain" and not scheduler.running and not scheduler.waiting)

    def _step(self, engine: Engine, scheduler: ContinuousScheduler) -> None:
        try:
            with self.turns:
                event = engine.step()
        except MemoryError as error:
            self._do_less(engine, scheduler, error)
            return
        for part in event.requests:
            request = self._handles[part.index].request
            if request.is_finished:
                self._end(request)
            else:
                self._handles[part.index].advance()
        self.observer.on_step(event)

    def _count(self, scheduler: ContinuousScheduler) -> None:
        before, self._num_waiting = self._num_waiting, len(scheduler.waiting)
        self.num_running, self.kv_held = len(scheduler.running), scheduler.kv_held
        if self._num_waiting < before:
            self._state.notify_all()  # there is room in the queue

    def _do_less(self, engine: Engine, scheduler: ContinuousScheduler, error: MemoryError) -> None:
        """A step ran out of memory, and nothing has changed: try less. Who is alone and still too large, fails."""
        if preempted := scheduler.relieve(engine.clock()):
            with self.turns:
                engine.forget(preempted)
        elif not scheduler.shrink():
            largest = max(scheduler.running, key=lambda request: len(request.tokens))
            largest.end(error)
            with self.turns:
                engine.retire([largest])
            self._end(largest)

    def _end(self, request: Request) -> None:
        handle = self._handles.pop(request.index)
        if request.error is not None:
            _let_go(request.error)
        handle.advance()
        self.observer.on_end(request)


def _let_go(error: BaseException) -> None:
    """Empty the frames that an error holds on to; they know the engine and all of its K/V."""
    at = error.__traceback__
    while at is not None:
        frame: Any = at.tb_frame
        while frame is not None:
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
            frame = frame.f_back
        at = at.tb_next


_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """The interpreter ends: a step in flight must not run into its ruins."""
    for batcher in list(_batchers):
        with contextlib.suppress(NotRunningError):
            batcher.stop(drain=False, timeout=None)
