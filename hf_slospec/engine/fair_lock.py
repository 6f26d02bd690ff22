"""``FairLock``, a first-come, first-served lock for threads that run the same models step by
step.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from hf_slospec.forks import reset_lock_in_children


class FairLock:
    """Reentrant lock that threads acquire in the order in which they asked for it, so that no
    thread starves.

    In a forked child process the lock is free, unless the forking thread holds it.
    """

    def __init__(self, on_idle: Callable[[], None] = lambda: None):
        """Create a free lock.

        Args:
            on_idle: called in a thread that will not compute for a while, for example because it
                passes the lock to another thread.
        """
        self._on_idle = on_idle
        self._owner: int | None = None
        self._depth = 0
        self.reset_after_fork()
        reset_lock_in_children(self)

    def reset_after_fork(self) -> None:
        """Remove all threads but the current one as holders and waiters."""
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        if self._owner != threading.get_ident():
            self._owner = None
            self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner = me
                self._depth = self._depth + 1
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            ticket.acquire()  # blocks until _hand_on releases it
        except BaseException:  # interrupted, perhaps after the lock was passed to this thread
            with self._guard:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                else:
                    self._hand_on()
            raise
        self._owner = me
        self._depth = 1

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock within this context, however often the calling thread holds it, and
        acquire it again at the end.
        """
        depth = self._depth
        interrupt: BaseException | None = None
        if self._waiting:
            self._on_idle()
        with self._guard:
            self._depth = 0
            self._hand_on()
        try:
            yield
        finally:
            while self._owner != threading.get_ident():
                try:
                    self.__enter__()
                except BaseException as error:  # noqa: BLE001  callers release a lock that they hold
                    interrupt = error
            self._depth = depth
            if interrupt is not None:
                raise interrupt

    def rest(self) -> None:
        """Run ``on_idle``, since the calling thread, which does not hold the lock, will not compute
        for a while.
        """
        self._on_idle()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._depth == 1 and self._waiting:
            self._on_idle()
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._hand_on()

    def _hand_on(self) -> None:
        """Pass the lock to the thread that has waited longest; it is not free in between, so no
        other thread can take it.
        """
        if self._waiting:
            self._owner = -1
            self._waiting.popleft().release()
        else:
            self._owner = None
