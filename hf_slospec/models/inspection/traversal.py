"""Traversal of a model's modules, and of containers in their attributes."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

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
    """Return what a container holds, of a dict keys and values in turn, without calling methods of its class."""
    if container_kind(container) is dict:
        return list(itertools.chain.from_iterable(list(dict.items(container))))  # other threads may add some
    return list(list.__iter__(container) if container_kind(container) is list else tuple.__iter__(container))
