"""What captured forwards of a model depend on, apart from their inputs."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from hf_slospec.models.inspection.fingerprint import PLAIN, settings, weight_homes
from hf_slospec.models.inspection.hooks import changing_hooks


class GraphPreconditions:
    """Addresses of a model's weights and settings of its modules, which captured forwards depend on."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._settings: Hashable = None
        self._version = 0
        self.renew()

    def renew(self) -> None:
        """Read the modules again: replaced ones, hooks, and plain attributes such as an adapter's switches."""
        modules = list(self._model.modules())
        has_hooks = any(changing_hooks(module) or hasattr(module, "_hf_hook") for module in modules)
        self._homes = list(weight_homes(self._model))
        weights = [home[name] for home, name in self._homes]
        are_plain = all(type(weight) in PLAIN for weight in weights)
        self.is_plain = are_plain and not has_hooks and len({weight.device for weight in weights}) == 1
        if (now := settings(self._model)) != self._settings:  # thousands of values, compared here and in no forward
            self._settings = now
            self._version += 1

    def now(self) -> Hashable:
        """Return a value that stays equal as long as no change is noticed."""
        weights = (home.get(name) for home, name in self._homes)
        return self._version, tuple(None if weight is None else weight.data_ptr() for weight in weights)
