"""Replacement of attributes of other libraries' objects while packed forwards run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

Attribute = tuple[Any, str]  # an object and the name of one of its attributes

_MISSING = object()
TEMPORARY = "_hf_slospec_temporary"  # attribute of functions that are set while a context lasts


class ReplacedAttributes:
    """Attributes that contexts in several threads may replace at once; the last context to end restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (id of the object, name) -> value before, value in the object's own __dict__, number of contexts.
        self._users: dict[tuple[int, str], tuple[Any, Any, int]] = {}

    def replace(self, attributes: Sequence[Attribute], replacement: Callable[[Any, Attribute], Any]) -> None:
        """Set each attribute to ``replacement(value, attribute)``, given the value that it has without replacements.

        An error of ``replacement`` leaves all attributes unchanged.
        """
        with self._lock:
            users = [self._users.get((id(owner), name)) or _unused(owner, name) for owner, name in attributes]
            values = [replacement(value, attribute) for (value, _, _), attribute in zip(users, attributes, strict=True)]
            for (owner, name), (value, stored, count), new in zip(attributes, users, values, strict=True):
                self._users[id(owner), name] = value, stored, count + 1
                if isinstance(new, FunctionType):
                    vars(new)[TEMPORARY] = True
                setattr(owner, name, new)

    def restore(self, attributes: Sequence[Attribute]) -> None:
        """End one context's replacement of the attributes."""
        with self._lock:
            for owner, name in attributes:
                value, stored, count = self._users.pop((id(owner), name))
                if count > 1:
                    self._users[id(owner), name] = value, stored, count - 1
                elif stored is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, stored)


def is_temporary(value: Any) -> bool:
    """Return whether a function was set by a context of :class:`ReplacedAttributes`."""
    return type(value) is FunctionType and TEMPORARY in vars(value)


def _unused(owner: Any, name: str) -> tuple[Any, Any, int]:
    return getattr(owner, name), vars(owner).get(name, _MISSING), 0
