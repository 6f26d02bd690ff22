"""Preconditions of captured forwards of a model: all that they read apart from their inputs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from hf_slospec.models.inspection.hooks import changing_hooks
from hf_slospec.models.inspection.model_changes import PLAIN, named_weights, settings
from hf_slospec.models.inspection.traversal import all_modules
from hf_slospec.models.inspection.weights_version import address


class GraphPreconditions:
    """Addresses of a model's weights, and settings of its modules."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._settings: Hashable = None
        self._version = 0
        self.renew()

    def renew(self) -> None:
        """Read the modules again: replaced ones, hooks, and plain attributes such as an adapter's switches."""
        modules = all_modules(self._model)
        has_hooks = any(changing_hooks(module) or hasattr(module, "_hf_hook") for module in modules)
        named = list(named_weights(self._model))
        self._named = [holder for holder, _ in named], [name for _, name in named]
        weights = [holder[name] for holder, name in named]
        are_plain = all(type(weight) in PLAIN and weight.layout is torch.strided for weight in weights)
        self.is_plain = are_plain and not has_hooks and len({weight.device for weight in weights}) == 1
        if (now := settings(self._model)) != self._settings:  # thousands of values, too many for every forward
            self._settings = now
            self._version += 1

    def now(self) -> Hashable:
        """Return a value that stays equal as long as no change is noticed."""
        try:  # at C's speed, as every verify step and every beam asks
            weights: Iterable[Any] = map(dict.get, *self._named)
            return self._version, tuple(map(torch.Tensor.data_ptr, weights))
        except (TypeError, RuntimeError):  # a weight is gone, or sparse
            found = (holder.get(name) for holder, name in zip(*self._named, strict=True))
            return self._version, tuple(None if weight is None else address(weight) for weight in found)
