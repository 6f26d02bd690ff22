"""Override that computes norms, gated MLPs, projections and rotary embeddings by fused kernels in
packed forwards.

A kernel is used only if its outputs for random values of the model's dtype agree with the
original's. The kernels are in ``fused_kernels.py`` and ``few_row_kernels.py``."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_slospec.cuda.few_rows import (
    Fusion,
    JointProjections,
    OutputPairs,
    are_few,
    is_plain,
    joint_projections,
    joint_rows,
    max_rows,
    random_like,
    shape_of,
    why_not,
)
from hf_slospec.cuda.flash_kernels import HALF
from hf_slospec.model.linear_overrides import Attribute, LinearOverride, Override, OverrideOptions
from hf_slospec.model.version import ModelVersion

logger = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"  # the function's name in transformers' modules
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # attributes of gated MLPs in transformers
TRIAL_TOKENS = 3  # tokens of the random inputs in a trial
DEVICE = "cuda"


class FusedLayers(LinearOverride):
    """Override of one model's norms, gated MLPs, projections and rotary embeddings."""

    def __init__(self, model: nn.Module):
        """Find by trials which layers can be fused."""
        by_class: dict[type, list[Any]] = {}
        for module in model.modules():
            by_class.setdefault(type(module), []).append(module)
        weight = next(model.parameters())
        sources = dict.fromkeys(sys.modules[kind.__module__] for kind in by_class)
        rotary: dict[Attribute, Override | None] = {
            (source, ROTARY): _first_right(
                [_rotary], functools.partial(_try_rotary, source, weight), source.__name__
            )
            for source in sources
            if hasattr(source, ROTARY)
        }
        self._functions = {name: each for name, each in rotary.items() if each is not None}
        self._by_class = {
            kind: _first_right(
                _candidates(layers), functools.partial(_try_layers, layers), kind.__name__
            )
            for kind, layers in by_class.items()
        }
        self._model = model
        self._joint_rows = joint_rows(model)
        self._projections: dict[nn.Module, JointProjections] = {}

    @classmethod
    def for_model(cls, model: nn.Module, options: OverrideOptions) -> FusedLayers | None:
        """Return the override for a model on CUDA in half precision; None for other models, without
        Triton, or with ``fused_layers=False``.
        """
        weights = {(weight.dtype, weight.device.type) for weight in model.parameters()}
        can_fuse = (
            options.fused_layers
            and weights <= {(dtype, DEVICE) for dtype in HALF}
            and importlib.util.find_spec("triton")
        )
        return cls(model) if can_fuse else None

    @property
    def functions(self) -> dict[Attribute, Override]:
        """Overrides of functions for rotary embeddings, by the module that defines the function."""
        return self._functions

    def renew(self, version: ModelVersion) -> None:
        """Find the projections to join in the model as it is now."""
        self._projections = joint_projections(self._model, self._joint_rows)

    def make(self, linear: nn.Module) -> Override | None:
        """Return the override of a joined projection, or else of the layer's class."""
        return self._projections.get(linear) or self._by_class.get(type(linear))


def _candidates(layers: Sequence[Any]) -> list[Override]:
    """Return the overrides to try for layers of one class; the first correct one is used."""
    if all(map(_is_norm, layers)):
        return [_norm(False), _norm(True)]
    return [GatedMlps(layers)] if all(map(_is_gated_mlp, layers)) else []


def _first_right(
    candidates: Iterable[Override], trial: Callable[[Override], OutputPairs], name: str
) -> Override | None:
    """Return the first override whose outputs are the original's up to rounding; None if all are
    wrong.
    """
    for override in candidates:
        if (why := why_not(trial(override))) is None:
            return override
        logger.debug("%s is not fused: %s", name, why)
    return None


def _try_layers(modules: list[Any], fused: Override) -> OutputPairs:
    """Yield each layer's outputs for random states, fused and original."""
    for module in modules:
        weight = next(module.parameters())
        states = random_like(weight, 1, TRIAL_TOKENS, weight.shape[-1])
        original = type(module).forward
        yield fused(original, module, states), original(module, states)


def _try_rotary(source: Any, weight: torch.Tensor, fused: Override) -> OutputPairs:
    """Yield rotated random queries and keys, fused and original."""
    values = random_like(weight, 8, TRIAL_TOKENS, 32)
    arguments = values[None, :4], values[None, 4:6], values[6:7], values[7:]
    original = getattr(source, ROTARY)
    yield from zip(fused(original, *arguments), original(*arguments), strict=True)


def _is_norm(module: Any) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return (
        "RMSNorm" in type(module).__name__
        and names == ["weight"]
        and _eps(module) > 0
        and _takes_states(module)
    )


def _is_gated_mlp(module: Any) -> bool:
    return all(hasattr(module, name) for name in GATED) and _takes_states(module)


def _takes_states(module: Any) -> bool:
    """Return whether the layer's forward takes hidden states only, not a gate as some norms do."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # self and the states


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def _norm(adds_one: bool) -> Override:
    def forward(original: Override, module: Any, states: torch.Tensor) -> Any:
        if not states.is_contiguous() or states.dtype not in HALF:
            return original(module, states)
        from hf_slospec.cuda.fused_kernels import rms_norm

        return rms_norm(states, module.weight, _eps(module), adds_one)

    return forward


class GatedMlps:
    """Override of the gated MLPs of one class: for few rows, one kernel computes gate, up and
    activation; for more rows, one kernel computes only ``activation(gate) * up``.
    """

    def __init__(self, mlps: Sequence[Any]):
        pairs = [
            (mlp, (mlp.gate_proj, mlp.up_proj))
            for mlp in mlps
            if type(mlp.act_fn) in _activations()
            and type(mlp.gate_proj) is nn.Linear
            and _takes_few(mlp, mlp.gate_proj.weight)
        ]
        self._by_shape = max_rows(Fusion(_gated, _gated_separately), pairs)

    def __call__(self, original: Override, mlp: Any, states: torch.Tensor) -> Any:
        """Return the output of an MLP, from ``original`` if its activation has no kernel."""
        if type(mlp.act_fn) not in _activations():
            return original(mlp, states)
        if self._by_shape and _takes_few(mlp, states):
            num_rows = self._by_shape.get(shape_of((mlp.gate_proj, mlp.up_proj)), 0)
            if are_few(states, mlp.gate_proj, num_rows):
                (gated,) = _gated(mlp, states.flatten(0, -2))
                return mlp.down_proj(gated.view(*states.shape[:-1], gated.shape[-1]))
        return mlp.down_proj(*_gated_separately(mlp, states))


def _takes_few(mlp: Any, states: torch.Tensor) -> bool:
    return all(
        is_plain(layer, states) and layer.bias is None for layer in (mlp.gate_proj, mlp.up_proj)
    )


def _gated(mlp: Any, states: torch.Tensor) -> tuple[torch.Tensor]:
    from hf_slospec.cuda.few_row_kernels import gated_product

    return (
        gated_product(
            states, mlp.gate_proj.weight, mlp.up_proj.weight, _activations()[type(mlp.act_fn)]
        ),
    )


def _gated_separately(mlp: Any, states: torch.Tensor) -> tuple[torch.Tensor]:
    from hf_slospec.cuda.fused_kernels import gated_activation

    gate = mlp.gate_proj(states)
    up = mlp.up_proj(states)
    return (gated_activation(gate.contiguous(), up.contiguous(), _activations()[type(mlp.act_fn)]),)


@functools.cache
def _activations() -> dict[type, int]:
    from transformers.activations import GELUTanh, SiLUActivation

    from hf_slospec.cuda.fused_kernels import GELU_TANH, SILU

    return {SiLUActivation: SILU, nn.SiLU: SILU, GELUTanh: GELU_TANH}


def _rotary(
    original: Override, query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any
) -> Any:
    shapes = query.shape[-1], key.shape[-1], sin.shape[-1]
    is_plain = (
        not (args or kwargs) and query.dim() == 4 and cos.dim() == 3 and len(query) == len(cos) == 1
    )
    if (
        not is_plain
        or set(shapes) != {cos.shape[-1]}
        or query.stride(-1) != 1
        or key.stride(-1) != 1
    ):
        return original(query, key, cos, sin, *args, **kwargs)
    from hf_slospec.cuda.fused_kernels import rotate

    return rotate(query, key, cos.contiguous(), sin.contiguous())
