"""Locks and shared state that stay usable in a forked child process, in which only the thread that
called fork goes on: locks that other threads held must be freed there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property as LockedProperty
from threading import Condition as PlainCondition
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload
from weakref import WeakSet

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Resettable(Protocol):
    """An object whose state several threads share, and that can be reset in a forked child."""

    def reset_after_fork(self) -> None:
        """Make the state consistent in a forked child, which runs only the current thread. Must be
        fast.
        """


_locks: WeakSet[Resettable] = WeakSet()
_owners: WeakSet[Resettable] = WeakSet()
# Context of :func:`undone` -> id of the thread that entered it, function to call at its end.
_undos: dict[object, tuple[int, Callable[[], None]]] = {}


def reset_lock_in_children(lock: Resettable) -> None:
    """Register a lock that a forked child resets first, before the objects that use locks."""
    _locks.add(lock)


def reset_in_children(owner: Resettable) -> None:
    """Register an object that a forked child resets after all registered locks were freed."""
    _owners.add(owner)


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls ``undo`` at its end. A forked child calls it at once if another
    thread had entered the context, since that thread does not exist there.
    """
    key = object()
    _undos[key] = threading.get_ident(), undo
    try:
        yield
    finally:
        del _undos[key]
        undo()


def _reset() -> None:
    for each in [*_locks, *_owners]:
        try:
            each.reset_after_fork()
        except Exception:  # one failure must not keep the other objects from being reset
            logger.exception(
                "a forked child could not reset a %s, which may fail there", type(each).__name__
            )
    for key, (thread, undo) in list(_undos.items()):
        if thread != threading.get_ident():
            del _undos[key]
            undo()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


class Lock:
    """Reentrant lock that is free in a forked child, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        reset_lock_in_children(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._lock.release()

    def reset_after_fork(self) -> None:
        """Replace the lock if it is held by a thread that does not exist in this forked child."""
        if not self._lock._is_owned():
            self._lock = threading.RLock()


class Condition(PlainCondition):
    """Condition variable whose lock is free in a forked child, unless the thread that called fork
    holds it; no thread waits for it there.
    """

    def __init__(self) -> None:
        super().__init__()
        reset_lock_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget the waiting threads and the holder of the lock, unless the current thread holds
        it.
        """
        is_held: bool = self._is_owned()  # type: ignore[attr-defined]  # not in typeshed
        if not is_held:
            super().__init__()


class cached_property(LockedProperty[T]):  # noqa: N801  a decorator
    """``functools.cached_property`` without the lock that Python 3.11's version has: a forked child
    would inherit it while another thread holds it, and would wait forever.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        value = self.func(instance)
        vars(instance)[str(self.attrname)] = value
        return value
