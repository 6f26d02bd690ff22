"""What a captured or compiled forward depends on beside its inputs: weights and settings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from hf_slospec.model.overrides import all_modules
from hf_slospec.model.version import PLAIN, address, named_weights, settings
from hf_slospec.model.whose_code import changing_hooks


def is_plain(model: torch.nn.Module) -> bool:
    """Return whether a model has no hooks, and weights of torch's classes on one device."""
    weights = [holder[name] for holder, name in named_weights(model)]
    has_hooks = any(
        changing_hooks(module) or hasattr(module, "_hf_hook") for module in all_modules(model)
    )
    are_plain = all(type(one) in PLAIN and one.layout is torch.strided for one in weights)
    return are_plain and not has_hooks and len({weight.device for weight in weights}) == 1


class GraphPreconditions:
    """Addresses of a model's weights, and settings of its modules."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._settings: Hashable = None
        self._version = 0
        self.renew()

    def renew(self) -> None:
        """Read the modules again: replaced ones, hooks, and plain attributes such as an adapter's
        switches.
        """
        named = list(named_weights(self._model))
        self._named = [holder for holder, _ in named], [name for _, name in named]
        self.is_plain = is_plain(self._model)
        if (
            now := settings(self._model)
        ) != self._settings:  # thousands of values, too many for every forward
            self._settings = now
            self._version += 1

    def now(self) -> Hashable:
        """Return a value that stays equal as long as no change is noticed."""
        try:  # at C's speed, as every verify step and every beam asks
            weights: Iterable[Any] = map(dict.get, *self._named)
            return self._version, tuple(map(torch.Tensor.data_ptr, weights))
        except (TypeError, RuntimeError):  # a weight is gone, or sparse
            found = (holder.get(name) for holder, name in zip(*self._named, strict=True))
            return self._version, tuple(
                None if weight is None else address(weight) for weight in found
            )
