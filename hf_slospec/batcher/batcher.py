"""``Batcher``: a thread that decodes the requests which other threads submit. Requests are made in
``batcher/service.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
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

    Other threads queue orders (submit a request, abort one, report the load), which that thread
    executes between steps, so that no other thread touches the engine or the scheduler.
    """

    _engine: Engine[ContinuousScheduler]  # set while the thread runs; only that thread uses it

    def __init__(
        self,
        new_engine: Callable[[], Engine[ContinuousScheduler]],
        max_queue: int,
        lock: FairLock,
        observer: Observer,
        in_thread: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        is_current: Callable[[], bool] = lambda: True,
    ):
        """Create a batcher without starting it.

        Args:
            new_engine: returns a new engine; called at every start, and when the models were moved
                or cast.
            max_queue: maximum number of waiting requests.
            lock: held during every step; other threads may run the same models between steps.
            observer: is told about every step and every request that ends.
            in_thread: returns a context manager in which the batcher's thread runs; must not raise.
            is_current: returns False if the models were moved or cast since the engine was made; a
                new engine is made then.
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
        """Drop the thread and its requests in a forked child process; they continue in the parent."""
        self._clear("runs in the process this one was forked from; call start() here")

    def _clear(self, why_not: str) -> None:
        self._changed = Condition()  # guards _orders, _state and counts
        self._orders = deque[Order]()
        self._state = BatcherState.TAKING
        self._pausing = list[int]()  # idents of the threads that pause this one, once per pause
        self._is_parked = False  # the thread waits for the end of the pauses
        self._handles: dict[int, RequestHandle] = {}  # unfinished requests by Request.index
        vars(self).pop("_engine", None)
        self.counts = Counts()
        self.step_begun_s: float | None = None  # time.monotonic() seconds; None between steps
        self._thread: threading.Thread | None = None
        self._why_not = why_not
        self._starting = Lock()

    # ---- methods that other threads call

    @property
    def is_running(self) -> bool:
        """Return whether the batcher's thread is alive in this process."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Return whether there is no unfinished request."""
        return not self._handles

    def start(self) -> None:
        """Start the thread if the batcher takes no requests; waits first for a stop in progress.

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
            # Making the engine may have run the models in this thread.
            self.lock.rest()
            thread = threading.Thread(
                target=self._run, args=(engine,), name="hf_slospec", daemon=True
            )
            with self._changed:  # the new thread takes no orders until the state is set
                thread.start()  # raises if the process has too many threads
                self._state = BatcherState.TAKING
                self._thread = thread
            _batchers.add(self)

    def submit(self, handle: RequestHandle, block: bool, timeout: float | None) -> None:
        """Queue a request for the batcher's thread.

        Raises:
            QueueFull: ``max_queue`` requests are waiting; with ``block``, only after ``timeout``
                seconds.
            NotRunningError: the batcher takes no requests.
        """
        # The batcher's own thread must not wait, since only this thread makes room in the queue.
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
        """Cancel a request or, with ``error``, end it as failed, before the next step."""
        with self._changed:
            if not handle.done():  # the order would stay queued until the next start
                self._order(Abort(handle, error))

    def load(self) -> Future[ReplicaLoad]:
        """Return a future of the scheduler's load, which is set before the next step.

        Raises:
            NotRunningError: the batcher takes no requests, or its own thread called this.
        """
        future: Future[ReplicaLoad] = Future()
        if self._thread is threading.current_thread():
            raise NotRunningError(WAITS_FOR_ITSELF)
        with self._changed:
            self.check_running()
            self._order(LoadReport(future))
        return future

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run no step within this context, which several threads may enter at the same time.
        Unfinished requests wait and keep their K/V.

        Raises:
            NotRunningError: the batcher does not run, its own thread called this, or it ended
                before it could pause.
        """
        self.check_running()
        if self._thread is threading.current_thread():
            raise NotRunningError(WAITS_FOR_ITSELF)
        with self._changed:
            self._pausing.append(threading.get_ident())
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_parked or self._state is BatcherState.STOPPING
                )
                self.check_running()
            yield
        finally:
            with self._changed:
                self._pausing.remove(threading.get_ident())
                self._changed.notify_all()

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Stop the thread: take no new requests, with ``drain`` finish the present ones within
        ``timeout`` seconds, and cancel the rest.

        Raises:
            NotRunningError: called by the batcher's own thread, or by one that pauses it.
        """
        thread = self._thread
        if thread is None:
            return
        self.check_may_stop()
        self._end_with(BatcherState.DRAINING if drain else BatcherState.STOPPING, thread)
        thread.join(timeout if drain else None)
        self._end_with(BatcherState.STOPPING, thread)
        thread.join()

    def check_may_stop(self) -> None:
        """Raise NotRunningError if the calling thread cannot stop the batcher; see :meth:`stop`."""
        if self._thread is threading.current_thread() or threading.get_ident() in self._pausing:
            raise NotRunningError(
                "stop() was called by the batcher's own thread, or by one that pauses it; call it from another one, "
                "or leave the pause first"
            )

    def _end_with(self, state: BatcherState, thread: threading.Thread) -> None:
        with self._changed:
            # Skipped if the batcher was restarted meanwhile, or is already stopping.
            if self._thread is thread and self._state is not BatcherState.STOPPING:
                self._state = state
                self._why_not = "was stopped; call start() to use it again"
                self._changed.notify_all()

    def check_running(self, hang_s: float = math.inf) -> None:
        """Raise NotRunningError if the batcher takes no requests or its current step has lasted
        longer than ``hang_s`` seconds.
        """
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

    # ---- methods that only the batcher's thread calls

    def _run(self, engine: Engine[ContinuousScheduler]) -> None:
        error: BaseException | None = None
        self._engine = engine
        del engine  # so that popping _engine below frees the K/V
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
        """End all unfinished requests with an error, since the models were moved or cast, and make
        a new engine.

        Returns:
            The error if no engine can be made of the models as they are now; None otherwise.
        """
        error = UnsupportedModelError(
            "the model was moved, cast or given another forward while requests were running; submit them again"
        )
        for request in self._unfinished():
            self._retire(request, error)
        replaced = self._engine
        try:
            self._engine = self.new_engine()
        except SLOSpecError as caught:  # tried again when the next orders arrive
            return caught
        with self.lock:
            replaced.close()
        return None

    def _may_go_on(self, unfinished: list[Request]) -> bool:
        """Return whether there is work or a change of the state, and no thread pauses the batcher."""
        self._is_parked = bool(self._pausing)
        if self._is_parked:
            self._changed.notify_all()
            return False
        return bool(unfinished or self._orders) or self._state is not BatcherState.TAKING

    def _take_orders(self) -> bool:
        """Wait for work or orders, execute the orders, and return whether the thread continues."""
        if not (unfinished := self._unfinished()):
            self.lock.rest()
        with self._changed:
            self._count()
            self._changed.wait_for(lambda: self._may_go_on(unfinished))
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
        """Add a submitted request to the scheduler, or end it with ``refusal``."""
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
            return  # the model was moved or cast during the step; the requests fail before the next
        finally:
            self.step_begun_s = None
        # Update the counts before waking threads that wait for a result and may read them.
        with self._changed:
            self._count()
        self._notify(self.observer.on_step, event)
        handles = [self._handles[part.index] for part in event.requests]
        wake(task for each in handles if not each.request.is_finished for task in each.advance())
        for handle in handles:
            if handle.request.is_finished:
                self._end(handle.request)

    def _count(self) -> None:
        scheduler = self._engine.scheduler
        before = self.counts.waiting
        arriving = [order for order in self._orders if isinstance(order, RequestHandle)]
        waiting = len(scheduler.waiting) + len(arriving)
        kept_tokens = self._engine.target.num_kept
        self.counts = Counts(len(scheduler.running), waiting, scheduler.kv_held, kept_tokens)
        if waiting < before:
            self._changed.notify_all()  # wake submit(), which waits for room in the queue

    def _do_less(self, error: MemoryError) -> None:
        """Reduce the work of the next steps after a step ran out of memory: free the drafter's
        memory, else preempt requests, else halve the requests or tokens per step, else fail the
        longest request.
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
        """End an unfinished request, as cancelled or with ``error``, and release its K/V."""
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
        """Run a callback of the observer; an exception of it is logged, and requests continue."""
        try:
            callback(event)
        except Exception:
            logger.exception(
                "the batcher's observer raised; requests continue, counts may be wrong"
            )


_batchers: weakref.WeakSet[Batcher] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop every batcher before the interpreter shuts down, so that no step is in progress during
    shutdown.
    """
    for batcher in list(_batchers):
        with contextlib.suppress(NotRunningError):
            batcher.stop(drain=False, timeout=None)
