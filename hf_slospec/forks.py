"""Locks and other state that a forked child resets, as all threads but the one that forked stayed
with the parent.
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
    """An object with state that threads share."""

    def reset_after_fork(self) -> None:
        """Make the state consistent in a forked child, which has the current thread only; take no
        time for more.
        """


_locks: WeakSet[Resettable] = WeakSet()
_owners: WeakSet[Resettable] = WeakSet()
_undos: dict[
    object, tuple[int, Callable[[], None]]
] = {}  # what to undo, with the thread whose context it is


def reset_lock_in_children(lock: Resettable) -> None:
    """Let forked children reset a lock, before everything else."""
    _locks.add(lock)


def reset_in_children(owner: Resettable) -> None:
    """Let forked children reset an object, all of whose locks are free then."""
    _owners.add(owner)


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Run ``undo`` at the end of this context, and in forked children that lack the context's
    thread.
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
        except Exception:  # the others must be reset all the same
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
        """Free the lock if a thread holds it that does not exist here."""
        if not self._lock._is_owned():
            self._lock = threading.RLock()


class Condition(PlainCondition):
    """Condition whose lock is free in a forked child, unless the thread that forked holds it; no
    thread waits.
    """

    def __init__(self) -> None:
        super().__init__()
        reset_lock_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop all threads that hold the lock or wait."""
        is_held: bool = self._is_owned()  # type: ignore[attr-defined]  # not in typeshed
        if not is_held:
            super().__init__()


class cached_property(LockedProperty[T]):  # noqa: N801  a decorator
    """``functools.cached_property`` without the lock that it has before Python 3.12, which children
    would inherit.
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
