"""Traversal of a model's modules."""

from __future__ import annotations

from typing import Any

from torch import nn


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
