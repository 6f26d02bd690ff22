"""Attributes of objects of others, replaced while packed forwards run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

Place = tuple[Any, str]  # an object and the name of one of its attributes

_MISSING = object()


class ReplacedAttributes:
    """Attributes that several contexts, of several threads, may replace at a time; the last to end restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By id of the object, and name: value, what the object itself has of it, number of contexts.
        self._users: dict[tuple[int, str], tuple[Any, Any, int]] = {}

    def replace(self, places: Sequence[Place], replacement: Callable[[Any, Place], Any]) -> None:
        """Set attributes to ``replacement(value, place)`` of the values that they have without this.

        An error of ``replacement`` leaves all as they were.
        """
        with self._lock:
            users = [self._users.get((id(owner), name)) or _unused(owner, name) for owner, name in places]
            values = [replacement(value, place) for (value, _, _), place in zip(users, places, strict=True)]
            for (owner, name), (value, own, count), new in zip(places, users, values, strict=True):
                self._users[id(owner), name] = value, own, count + 1
                setattr(owner, name, new)

    def restore(self, places: Sequence[Place]) -> None:
        """End one use of the attributes."""
        with self._lock:
            for owner, name in places:
                value, own, count = self._users.pop((id(owner), name))
                if count > 1:
                    self._users[id(owner), name] = value, own, count - 1
                elif own is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)


def _unused(owner: Any, name: str) -> tuple[Any, Any, int]:
    return getattr(owner, name), vars(owner).get(name, _MISSING), 0
