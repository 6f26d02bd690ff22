"""Replacement of attributes of other libraries' objects while packed forwards run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

from hf_slospec.forks import Lock, reset_in_children

Attribute = tuple[Any, str]  # an object and the name of one of its attributes

_MISSING = object()
TEMPORARY = "_hf_slospec_temporary"  # attribute of functions that are set while a context lasts


class ReplacedAttributes:
    """Attributes that contexts in several threads may replace at once; the last context to end
    restores them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # (id of the object, name) -> the object, value before, value in its own __dict__, threads
        # of the contexts.
        self._users: dict[tuple[int, str], tuple[Any, Any, Any, list[int]]] = {}
        reset_in_children(self)

    def replace(
        self, attributes: Sequence[Attribute], replacement: Callable[[Any, Attribute], Any]
    ) -> None:
        """Set each attribute to ``replacement(value, attribute)``, given the value that it has
        without replacements.

        An error of ``replacement`` leaves all attributes unchanged.
        """
        with self._lock:
            users = [
                self._users.get((id(owner), name)) or _unused(owner, name)
                for owner, name in attributes
            ]
            values = [
                replacement(user[1], attribute)
                for user, attribute in zip(users, attributes, strict=True)
            ]
            for (owner, name), (_, value, stored, threads), new in zip(
                attributes, users, values, strict=True
            ):
                self._users[id(owner), name] = owner, value, stored, [*threads, get_ident()]
                if isinstance(new, FunctionType):
                    vars(new)[TEMPORARY] = True
                setattr(owner, name, new)

    def restore(self, attributes: Sequence[Attribute]) -> None:
        """End one context's replacement of the attributes."""
        with self._lock:
            for owner, name in attributes:
                threads = self._users[id(owner), name][-1]
                threads.remove(get_ident())
                self._set_back_unless_used((id(owner), name))

    def _set_back_unless_used(self, key: tuple[int, str]) -> None:
        owner, _, stored, threads = self._users[key]
        if not threads:
            if stored is not _MISSING:
                setattr(owner, key[1], stored)
            elif key[1] in vars(owner):
                delattr(owner, key[1])
            del self._users[key]

    def reset_after_fork(self) -> None:
        """End the contexts of threads that do not exist here, also of one that had replaced only
        some attributes.
        """
        for key, (*_, threads) in list(self._users.items()):
            threads[:] = [thread for thread in threads if thread == get_ident()]
            self._set_back_unless_used(key)


def is_temporary(value: Any) -> bool:
    """Return whether a function was set by a context of :class:`ReplacedAttributes`."""
    return type(value) is FunctionType and TEMPORARY in vars(value)


def _unused(owner: Any, name: str) -> tuple[Any, Any, Any, list[int]]:
    return owner, getattr(owner, name), vars(owner).get(name, _MISSING), []


class Prepacked:
    """Base of the class that a layer has while a packed forward runs.

    Nothing else of the layer changes, so that other threads may copy it or run forwards of their
    own meanwhile."""

    plain: ClassVar[type[nn.Module]]  # original class of the layer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.plain,), self.__dict__


def plain_class(layer: nn.Module) -> Any:
    """Return the layer's original class."""
    return layer.plain if isinstance(layer, Prepacked) else type(layer)


def set_class(layer: nn.Module, kind: Any) -> None:
    """Set a layer's class; an assignment would take twenty times as long."""
    object.__setattr__(layer, "__class__", kind)


CONTAINERS = (dict, list, tuple)


def all_modules(model: nn.Module) -> list[Any]:
    """Return a model and all parts of it.

    ``model.modules()`` takes several times as long, and each step reads the modules several times.
    """
    modules: list[Any] = [model]
    known = {id(model)}  # modules may have several owners, and hold each other
    for module in modules:
        if parts := module._modules:
            for part in list(parts.values()):  # other threads may add some
                if part is not None and id(part) not in known:
                    known.add(id(part))
                    modules.append(part)
    return modules


def container_kind(value: Any) -> type[Any] | None:
    """Return dict, list or tuple if the value's class is derived from it; None for anything else."""
    kind = type(value)
    return next((base for base in CONTAINERS if kind is base or issubclass(kind, base)), None)


def items_of(container: Any) -> list[Any]:
    """Return what a container holds, of a dict keys and values in turn, without calling methods of
    its class.
    """
    if container_kind(container) is dict:
        return list(
            itertools.chain.from_iterable(list(dict.items(container)))
        )  # other threads may add some
    return list(
        list.__iter__(container) if container_kind(container) is list else tuple.__iter__(container)
    )
