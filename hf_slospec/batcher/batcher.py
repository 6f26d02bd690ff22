"""The thread that decodes what other threads submit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from hf_slospec.batcher.handle import WAITS_FOR_ITSELF, RequestHandle, waiting_s, wake
from hf_slospec.batcher.orders import Abort, BatcherState, Counts, LoadReport, Observer, Order
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.step import Engine
from hf_slospec.errors import (
    NotGuaranteedError,
    NotRunningError,
    QueueFull,
    SLOSpecError,
    UnsupportedModelError,
)
from hf_slospec.forks import Condition, Lock, reset_in_children
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.scheduler.load import ReplicaLoad, load_of

logger = logging.getLogger(__name__)


class Batcher:
    """Runs one engine in its own thread.

    Other threads queue orders, which that thread carries out between steps, so that no other thread
    touches engine and scheduler."""

    _engine: Engine[ContinuousScheduler]  # while its thread runs, which alone uses it

    def __init__(
        self,
        new_engine: Callable[[], Engine[ContinuousScheduler]],
        max_queue: int,
        lock: FairLock,
        observer: Observer,
        in_thread: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        is_current: Callable[[], bool] = lambda: True,
    ):
        """Create a batcher that is not started.

        Args:
            new_engine: makes the engine of each start.
            max_queue: maximum number of waiting requests.
            lock: held while the engine is used; other threads may run the same models between
                steps.
            in_thread: makes the context of the batcher's thread; must not raise.
            is_current: returns False once the models were moved or cast; a new engine is made then.
        """
        self.in_thread = in_thread
        self.is_current = is_current
        self.new_engine = new_engine
        self.max_queue = max_queue
        self.lock = lock
        self.observer = observer
        self._clear("has not been started; call start(), or use `with generator:`")
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop the thread and its requests, which stayed with the parent."""
        self._clear("runs in the process this one was forked from; call start() here")

    def _clear(self, why_not: str) -> None:
        self._changed = Condition()  # guards orders, state and counts
        self._orders = deque[Order]()
        self._state = BatcherState.TAKING
        self._handles: dict[int, RequestHandle] = {}  # unfinished requests, by index
        vars(self).pop("_engine", None)
        self.counts = Counts()
        self.step_begun_s: float | None = None  # by the monotonic clock; None between steps
        self._thread: threading.Thread | None = None
        self._why_not = why_not
        self._starting = Lock()

    # ---- for other threads

    @property
    def is_running(self) -> bool:
        """Return whether its thread runs, in this process."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Return whether it has no unfinished request."""
        return not self._handles

    def start(self) -> None:
        """Start the thread unless it takes requests; a stop in progress is waited for.

        Raises:
            NotRunningError: called by the batcher's own thread while it stops.
        """
        if self._is_taking:
            return
        if self._thread is threading.current_thread():
            raise NotRunningError(
                "start() was called by the batcher's own thread while it stops; call it from another"
            )
        with self._starting:
            if self._is_taking:
                return
            if self._thread is not None:
                self._thread.join()
            engine = self.new_engine()
            self.lock.rest()  # this thread may have loaded and measured the models
            thread = threading.Thread(
                target=self._run, args=(engine,), name="hf_slospec", daemon=True
            )
            with self._changed:  # until the state is complete, the thread takes no orders
                thread.start()  # may raise, with too many threads
                self._state = BatcherState.TAKING
                self._thread = thread
            _batchers.add(self)

    def submit(self, handle: RequestHandle, block: bool, timeout: float | None) -> None:
        """Queue a request.

        Raises:
            QueueFull: at once, or with ``block`` after ``timeout`` seconds.
            NotRunningError: the batcher takes no requests.
        """
        # The batcher's own thread must not wait, as only it makes room.
        may_wait = block and threading.current_thread() is not self._thread
        self.check_running()
        limit_s = waiting_s(timeout) if may_wait else 0.0
        with self._changed:
            is_room = self._changed.wait_for(
                lambda: self.counts.waiting < self.max_queue or not self._is_taking, limit_s
            )
            self.check_running()
            if not is_room:
                raise QueueFull(
                    f"{self.counts.waiting} requests are waiting, which is max_queue; submit with block=True, or later"
                )
            handle.thread = self._thread
            self._handles[handle.request.index] = handle
            self.counts = self.counts._replace(waiting=self.counts.waiting + 1)
            self._order(handle)

    def _order(self, order: Order) -> None:
        self._orders.append(order)
        self._changed.notify_all()

    def abort(self, handle: RequestHandle, error: BaseException | None) -> None:
        """Cancel a request, or fail it with an error, before the next step."""
        with self._changed:
            if not handle.done():  # otherwise it would stay here until the next start
                self._order(Abort(handle, error))

    def load(self) -> Future[ReplicaLoad]:
        """Return the engine's load before the next step; raise NotRunningError if there is none."""
        future: Future[ReplicaLoad] = Future()
        if self._thread is threading.current_thread():
            raise NotRunningError(WAITS_FOR_ITSELF)
        with self._changed:
            self.check_running()
            self._order(LoadReport(future))
        return future

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Take no more requests, with ``drain`` finish the present ones for ``timeout`` seconds,
        and cancel the rest.

        Raises:
            NotRunningError: called by the batcher's own thread.
        """
        thread = self._thread
        if thread is None:
            return
        if thread is threading.current_thread():
            raise NotRunningError(
                "stop() was called by the batcher's own thread; call it from another one"
            )
        self._end_with(BatcherState.DRAINING if drain else BatcherState.STOPPING, thread)
        thread.join(timeout if drain else None)
        self._end_with(BatcherState.STOPPING, thread)
        thread.join()

    def _end_with(self, state: BatcherState, thread: threading.Thread) -> None:
        with self._changed:
            # Neither restarted, nor stopping already.
            if self._thread is thread and self._state is not BatcherState.STOPPING:
                self._state = state
                self._why_not = "was stopped; call start() to use it again"
                self._changed.notify_all()

    def check_running(self, hang_s: float = math.inf) -> None:
        """Raise NotRunningError unless requests are taken and the step lasts under ``hang_s``."""
        if not self._is_taking:
            raise NotRunningError(f"the batcher {self._why_not}")
        begun_s = self.step_begun_s
        if begun_s is not None and time.monotonic() - begun_s > hang_s:
            raise NotRunningError(
                f"a step of the batcher has not ended for more than {hang_s:g} s; restart it"
            )

    @property
    def _is_taking(self) -> bool:
        return self.is_running and self._state is BatcherState.TAKING

    # ---- the engine's thread

    def _run(self, engine: Engine[ContinuousScheduler]) -> None:
        error: BaseException | None = None
        self._engine = engine
        del engine  # it holds all K/V
        with self.in_thread():
            for part in (self._serve, self._close):
                try:
                    part()
                except BaseException as caught:  # noqa: BLE001  every waiting handle raises it
                    error = error or caught
            vars(self).pop("_engine", None)
        with self._changed:
            if error is not None:
                self._why_not = f"died of {error!r}; call start() to use it again"
            unfinished = list(self._handles.values())
            reports = [order.future for order in self._orders if isinstance(order, LoadReport)]
            self.counts = Counts()
            self._state = BatcherState.STOPPING
            self._changed.notify_all()
        for future in reports:
            if future.set_running_or_notify_cancel():
                future.set_exception(NotRunningError(f"the batcher {self._why_not}"))
        for handle in unfinished:
            handle.request.end(error)
            self._end(handle.request)
        with self._changed:
            self._orders.clear()

    def _serve(self) -> None:
        while self._take_orders():
            if self._unfinished():
                self._step()
        with self.lock:
            self._engine.retire(self._unfinished())

    def _close(self) -> None:
        with self.lock:
            self._engine.close()

    def _unfinished(self) -> list[Request]:
        return [*self._engine.scheduler.running, *self._engine.scheduler.waiting]

    def _replace_engine(self) -> SLOSpecError | None:
        """End requests whose models were moved, and make a new engine or return an error."""
        error = UnsupportedModelError(
            "the model was moved, cast or given another forward while requests were running; submit them again"
        )
        for request in self._unfinished():
            self._retire(request, error)
        replaced = self._engine
        try:
            self._engine = self.new_engine()
        except SLOSpecError as caught:  # the next requests try again
            return caught
        with self.lock:
            replaced.close()
        return None

    def _take_orders(self) -> bool:
        """Wait for work or orders, carry the orders out, and return whether to go on."""
        is_busy = bool(self._unfinished())
        if not is_busy:
            self.lock.rest()
        with self._changed:
            self._count()
            self._changed.wait_for(
                lambda: is_busy or self._orders or self._state is not BatcherState.TAKING
            )
            num_orders = len(self._orders)
            state = self._state
        refusal = None if self.is_current() else self._replace_engine()
        for _ in range(num_orders):
            match self._orders.popleft():
                case RequestHandle(request=request):
                    self._take(request, refusal)
                case Abort(handle, error):
                    if not handle.request.is_finished:
                        self._retire(handle.request, error)
                case LoadReport(future):
                    if future.set_running_or_notify_cancel():
                        future.set_result(load_of(self._engine.scheduler))
        if state is BatcherState.DRAINING:
            return bool(self._unfinished())
        return state is BatcherState.TAKING

    def _take(self, request: Request, refusal: SLOSpecError | None) -> None:
        """Queue a request in the scheduler, or refuse it."""
        if refusal is None and request.params.must_guarantee:
            with self.lock:
                if not self._engine.scheduler.offer(request, self._engine.clock()):
                    refusal = NotGuaranteedError(
                        f"the SLOs of request {request.index} cannot be guaranteed now"
                    )
        elif refusal is None:
            self._engine.scheduler.add(request)
        if refusal is None:
            wake(self._handles[request.index].advance())
        else:
            request.end(refusal)
            self._end(request)

    def _step(self) -> None:
        try:
            with self.lock:
                self.step_begun_s = time.monotonic()
                event = self._engine.step()
        except MemoryError as error:
            self._do_less(error)
            return
        except Exception:
            if self.is_current():
                raise
            return  # the model was cast during the step; the requests fail before the next one
        finally:
            self.step_begun_s = None
        # Counted first: threads that wait for a result may read the counts.
        with self._changed:
            self._count()
        self._notify(self.observer.on_step, event)
        handles = [self._handles[part.index] for part in event.requests]
        going_on = [each for each in handles if not each.request.is_finished]
        wake(waker for handle in going_on for waker in handle.advance())
        for handle in handles:
            if handle.request.is_finished:
                self._end(handle.request)

    def _count(self) -> None:
        scheduler = self._engine.scheduler
        before = self.counts.waiting
        arriving = sum(isinstance(order, RequestHandle) for order in self._orders)
        waiting = len(scheduler.waiting) + arriving
        num_kept = self._engine.target.num_kept
        self.counts = Counts(len(scheduler.running), waiting, scheduler.kv_held, num_kept)
        if waiting < before:
            self._changed.notify_all()  # there is room in the queue

    def _do_less(self, error: MemoryError) -> None:
        """Reduce the work of steps after one ran out of memory; a request that is too large by
        itself fails.
        """
        engine = self._engine
        with self.lock:
            if engine.relieve():
                return
            preempted = engine.scheduler.relieve(engine.clock())
            engine.forget(preempted)
        if not preempted and not engine.scheduler.shrink():
            longest = max(engine.scheduler.running, key=lambda request: len(request.tokens))
            self._retire(longest, error)

    def _retire(self, request: Request, error: BaseException | None) -> None:
        """End a request that is not finished."""
        request.end(error)
        with self.lock:
            self._engine.retire([request])
        self._end(request)

    def _end(self, request: Request) -> None:
        handle = self._handles.pop(request.index)
        try:
            self._notify(self.observer.on_end, request)
        finally:
            wake(handle.advance())

    def _notify(self, callback: Callable[[Any], None], event: Any) -> None:
        """Pass an event to the observer; requests continue if that raises."""
        try:
            callback(event)
        except Exception:
            logger.exception(
                "the batcher's observer raised; requests continue, counts may be wrong"
            )


_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop every batcher before the interpreter shuts down, so that no step is in progress then."""
    for batcher in list(_batchers):
        with contextlib.suppress(NotRunningError):
            batcher.stop(drain=False, timeout=None)
