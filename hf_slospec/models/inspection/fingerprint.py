"""Changes of what a model's forwards depend on: by identity for kept K/V, by value for captured forwards."""

from __future__ import annotations

import functools
import operator
import threading
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_slospec.models.inspection.layer_classes import plain_class
from hf_slospec.models.inspection.weights_version import Weights, may_be_trained

OWN = {"_parameters", "_buffers", "_modules", *(name for name in vars(torch.nn.Module()) if "hooks" in name)}
# Drafts are set to evaluation mode for the time they run, and forwards in training mode are not captured. A config's
# attention implementation is ours while a forward runs. Weights are read separately. Stock `generate` leaves the
# positions of its last prompt with images in `rope_deltas`, which packed forwards do not read; nor do they read what
# stock generation keeps for its next call: a manager of continuous batching, and a compiled forward.
PASSING = {"training", "_attn_implementation_internal", "_parameters", "_buffers", "rope_deltas"} | {
    "_cached_continuous_batching_manager",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
}
NO_SETTINGS = PASSING | OWN
FUNCTIONS = types.FunctionType, types.MethodType, functools.partial  # such as a forward set on an instance
PLAIN = (torch.Tensor, torch.nn.Parameter)  # quantised weights have classes of their own and may have no address
LIBRARIES = ("torch", "transformers")  # modules of others are adapters, or users' own
CONTAINERS = (dict, OrderedDict, list)


class Fingerprint:
    """Notices changes of what a model's forwards compute: of its weights, and of all that its modules hold.

    What modules hold is compared by identity, which takes a millisecond where :func:`settings` takes ten. What is
    replaced by an equal object counts as changed.
    """

    def __init__(self, model: torch.nn.Module):
        """Read the model; ``state`` is 0."""
        self._model, self.state = model, 0
        self._lock, self._renewing = threading.Lock(), threading.Lock()
        self._adapters: list[torch.nn.Module] = []
        self._of_adapters: list[Any] = []
        weights = self._read()
        self._weights = Weights(weights, self._may_be_written(weights))

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped since the last ``renew``, or a user has told of other writes."""
        return self._weights.is_behind

    def renew(self, is_idle: bool = True) -> bool:
        """Read the whole model; return whether something has changed, and count ``state`` up if so.

        Args:
            is_idle: no request runs; otherwise, writes to weights that leave no trace are not looked for.
        """
        with self._renewing:
            held = self._held
            weights = self._read()
            has_changed = self._weights.renew(weights, is_idle and self._may_be_written(weights))
            has_changed |= not _are_same(held, self._held)
            if has_changed:
                self.count()
            return has_changed

    def notice(self) -> None:
        """Count ``state`` up if an adapter has changed, which may be changed back before the next ``renew``."""
        with self._lock:
            if not self._adapters or _are_same(self._of_adapters, now := _held_by(self._adapters)):
                return
            self._of_adapters = now
        self.count()

    def count(self) -> None:
        """Count ``state`` up for a change that was noticed otherwise."""
        with self._lock:
            self.state += 1

    def _may_be_written(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether something may write weights without a trace, as far as the model shows."""
        return self._model.training or may_be_trained(weights)

    def _read(self) -> list[torch.Tensor]:
        """Read what the modules hold, and return their weights."""
        modules = [self._model]
        for module in modules:  # torch's own traversal takes most of the time
            modules.extend(part for part in list(module._modules.values()) if part is not None)
        homes = [home for module in modules for home in (module._parameters, module._buffers) if home]
        self._held = [*map(plain_class, modules), *_held_by(modules), *_held_by(_configs(modules))]
        adapters = [one for one in modules if plain_class(one).__module__.split(".")[0] not in LIBRARIES]
        with self._lock:
            self._adapters, self._of_adapters = adapters, _held_by(adapters)
        return [weight for home in homes for weight in home.values() if weight is not None]


def _configs(modules: Iterable[Any]) -> list[Any]:
    configs = {id(config): config for one in modules if hasattr(config := vars(one).get("config"), "__dict__")}
    return list(configs.values())


def _held_by(owners: Iterable[Any]) -> list[Any]:
    """Return all attributes of modules and configs, and what is in those that are containers; not the weights."""
    held: list[Any] = []
    for owner in owners:
        attributes = vars(owner)
        for name, value in list(attributes.items()):  # other threads may add some
            if name not in PASSING:
                held.append(value)
                if type(value) in CONTAINERS:
                    held.extend(list(value.values() if isinstance(value, dict) else value))
    return held


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def weight_homes(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dict and the name of every parameter and buffer."""
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            yield from ((home, name) for name, tensor in home.items() if tensor is not None)


def settings(model: torch.nn.Module) -> Hashable:
    """Return the settings of all modules and configs: plain attributes such as an adapter's switches."""
    modules = list(model.modules())
    own = ((plain_class(module), vars(module)) for module in modules)
    return tuple((kind, _settings_of(attributes)) for kind, attributes in own) + tuple(
        (type(config), _settings_of(vars(config))) for config in _configs(modules)
    )


def _settings_of(attributes: dict[str, Any]) -> Hashable:
    # Parameters, buffers, submodules and hooks are read separately.
    return tuple((name, _fixed(value)) for name, value in attributes.items() if name not in NO_SETTINGS)


def _fixed(value: Any) -> Hashable:
    """Return a value that is equal for attributes with the same effect on a forward, as far as can be told."""
    if isinstance(value, PLAIN):
        return value.data_ptr(), value.shape, value.dtype  # graphs read it at its address
    if isinstance(value, dict):
        return dict, tuple((key, _fixed(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_fixed, value))
    if isinstance(value, (bool, int, float, str, type(None), *FUNCTIONS)):
        return type(value), value
    return (type(value),)
