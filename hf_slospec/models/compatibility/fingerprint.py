"""Values that change with what a model's forwards depend on: weights, settings of its modules, adapters."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from hf_slospec.models.cpu.packed_layers import plain_class

OWN = {"_parameters", "_buffers", "_modules", *(name for name in vars(torch.nn.Module()) if "hooks" in name)}
FUNCTIONS = types.FunctionType, types.MethodType, functools.partial  # such as a forward set on an instance
PLAIN = (torch.Tensor, torch.nn.Parameter)  # quantised weights have classes of their own and may have no address


LIBRARIES = ("torch", "transformers")  # whose modules keep their settings; those of others are adapters, or users' own


def fingerprint(model: torch.nn.Module) -> Hashable:
    """Return a value that stays equal as long as no change of weights or adapters is noticed.

    It takes a millisecond where :func:`settings` takes ten. Writes to ``weight.data``, which torch does not count, are
    not noticed.
    """
    own = [module for module in model.modules() if not plain_class(module).__module__.startswith(LIBRARIES)]
    weights = tuple(_state_of(home[name]) for home, name in weight_homes(model))
    return weights, tuple((plain_class(module), _settings_of(vars(module))) for module in own)


def weight_homes(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dict and the name of every parameter and buffer."""
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            yield from ((home, name) for name, tensor in home.items() if tensor is not None)


def settings(model: torch.nn.Module) -> Hashable:
    """Return the settings of all modules and configs: plain attributes such as an adapter's switches."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    own = ((plain_class(module), vars(module)) for module in modules)
    return tuple((kind, _settings_of(attributes)) for kind, attributes in own) + tuple(
        (type(config), _settings_of(vars(config))) for config in configs.values()
    )


def _state_of(weight: torch.Tensor) -> Hashable:
    is_counted = type(weight) in PLAIN and not weight.is_inference()
    return weight.data_ptr() if type(weight) in PLAIN else id(weight), weight._version if is_counted else None


def _settings_of(attributes: dict[str, Any]) -> Hashable:
    # Drafts are set to evaluation mode for the time they run, and forwards in training mode are not captured. A
    # config's attention implementation is ours while a forward runs. Parameters, buffers, submodules and hooks are
    # read separately.
    passing = {"training", "_attn_implementation_internal", *OWN}
    return tuple((name, _fixed(value)) for name, value in attributes.items() if name not in passing)


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
