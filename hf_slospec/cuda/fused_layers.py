"""Layers of a model that packed forwards compute by one kernel instead of several operators.

The functions replace methods of the model's classes, and functions of their modules, while packed
forwards run and in their threads only. Each is compared with the original on random values of the
model's dtype first."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hf_slospec.cuda.few_rows import (
    JointProjections,
    Way,
    are_few,
    is_plain,
    is_small,
    max_rows,
    shape_of,
)
from hf_slospec.cuda.flash_kernels import HALF
from hf_slospec.model.overrides import Attribute, ReplacedAttributes

logger = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"  # the function's name in transformers' modules
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # attributes of gated MLPs in transformers
TRIAL_TOKENS = 3
DEVICE = "cuda"

Fused = Callable[..., Any]  # takes the original as its first argument
Trial = Callable[
    [Fused], Iterator[tuple[torch.Tensor, torch.Tensor]]
]  # outputs of the function and the original
_active: ContextVar[dict[Attribute, Fused] | None] = ContextVar(
    "hf_slospec_fused_layers", default=None
)
_replaced = ReplacedAttributes()


class FusedLayers:
    """The fused layers of one model on CUDA in half precision; none elsewhere."""

    def __init__(self, model: nn.Module, wanted: bool):
        """Try which layers can be fused, if ``wanted``."""
        self._fused: dict[Any, Fused] = {}  # by attribute
        weights = {(weight.dtype, weight.device.type) for weight in model.parameters()}
        if (
            wanted
            and weights <= {(dtype, DEVICE) for dtype in HALF}
            and importlib.util.find_spec("triton")
        ):
            self._fused = dict(_fusable_in(model))
        self.attributes: list[Attribute] = list(self._fused)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute the layers by the kernels inside this context, in this thread only."""
        if not self.attributes:
            yield
            return
        _replaced.replace(self.attributes, _fused_or)
        token = _active.set(self._fused)
        try:
            yield
        finally:
            _active.reset(token)
            _replaced.restore(self.attributes)


def _fused_or(original: Fused, attribute: Attribute) -> Fused:
    """Return the value of an attribute while a packed forward runs in some thread."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # a compiler in another thread, which cannot trace what follows
            return original(*args, **kwargs)
        fused = (_active.get() or {}).get(attribute)
        return original(*args, **kwargs) if fused is None else fused(original, *args, **kwargs)

    return function


def _fusable_in(model: nn.Module) -> Iterator[tuple[Attribute, Fused]]:
    """Yield attributes of the model's classes and modules that can be fused, and the functions to
    use instead.
    """
    by_class: dict[type, list[Any]] = {}
    for module in model.modules():
        by_class.setdefault(type(module), []).append(module)
    candidates: list[tuple[Attribute, tuple[Fused, ...], Trial]] = []
    for kind, modules in by_class.items():
        if all(map(_is_norm, modules)):
            candidates.append(
                (
                    (kind, "forward"),
                    (_norm(False), _norm(True)),
                    functools.partial(_try_layers, modules),
                )
            )
        elif all(map(_is_gated_mlp, modules)):
            mlps = GatedMlps(modules)
            candidates.append(((kind, "forward"), (mlps,), functools.partial(_try_layers, modules)))
    weight = next(model.parameters())
    sources = dict.fromkeys(sys.modules[kind.__module__] for kind in by_class)
    candidates += [
        ((source, ROTARY), (_rotary,), functools.partial(_try_rotary, source, weight))
        for source in sources
        if hasattr(source, ROTARY)
    ]
    for attribute, functions, trial in candidates:
        for fused in functions:
            if (why := _why_not(fused, trial)) is None:
                yield attribute, fused
                break
            logger.debug("%s.%s is not fused: %s", attribute[0].__name__, attribute[1], why)
    if projections := JointProjections(model):
        yield (nn.Linear, "forward"), projections


@torch.no_grad()
def _why_not(fused: Fused, trial: Trial) -> str | None:
    """Return why a function cannot replace the original; None if it can."""
    try:
        pairs = [((a.float() - b.float()).norm(), b.float().norm()) for a, b in trial(fused)]
    except Exception as error:  # noqa: BLE001  layers of any signature, and Triton fails in many ways
        return repr(error)
    off = [
        f"{float(error):.2g} of {float(size):.2g}"
        for error, size in pairs
        if not is_small(error, size)
    ]
    return f"it is off by {off[0]}" if off else None


def _try_layers(modules: list[Any], fused: Fused) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the outputs of the function and of the original for random states, for each layer."""
    for module in modules:
        weight = next(module.parameters())
        draw = torch.Generator(weight.device).manual_seed(0)
        shape = 1, TRIAL_TOKENS, weight.shape[-1]
        states = torch.randn(shape, generator=draw, dtype=weight.dtype, device=weight.device)
        original = type(module).forward
        yield fused(original, module, states), original(module, states)


def _try_rotary(
    source: Any, weight: torch.Tensor, fused: Fused
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator(weight.device).manual_seed(0)
    query, key, cos, sin = (
        torch.randn(shape, generator=draw, dtype=weight.dtype, device=weight.device)
        for shape in (
            (1, 4, TRIAL_TOKENS, 32),
            (1, 2, TRIAL_TOKENS, 32),
            *[(1, TRIAL_TOKENS, 32)] * 2,
        )
    )
    original = getattr(source, ROTARY)
    yield from zip(
        fused(original, query, key, cos, sin), original(query, key, cos, sin), strict=True
    )


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
    """Return whether the layer's forward takes states and nothing else, such as a gate."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # self and the states


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def _norm(adds_one: bool) -> Fused:
    def forward(original: Fused, module: Any, states: torch.Tensor) -> Any:
        if not states.is_contiguous() or states.dtype not in HALF:
            return original(module, states)
        from hf_slospec.cuda.fused_kernels import rms_norm

        return rms_norm(states, module.weight, _eps(module), adds_one)

    return forward


class GatedMlps:
    """Gated MLPs of one class: for few rows gate, up and activation are one kernel, otherwise the
    activation is.
    """

    def __init__(self, mlps: Sequence[Any]):
        with_few = [
            mlp
            for mlp in mlps
            if type(mlp.act_fn) in _activations() and type(mlp.gate_proj) is nn.Linear
        ]
        pairs = [
            (mlp, (mlp.gate_proj, mlp.up_proj))
            for mlp in with_few
            if _takes_few(mlp, mlp.gate_proj.weight)
        ]
        self._by_shape = max_rows(Way(_gated, _gated_separately), pairs)

    def __call__(self, original: Fused, mlp: Any, states: torch.Tensor) -> Any:
        """Return an MLP's output; the signature is that of fused layers."""
        if type(mlp.act_fn) not in _activations():
            return original(mlp, states)
        if self._by_shape and _takes_few(mlp, states):
            most = self._by_shape.get(shape_of((mlp.gate_proj, mlp.up_proj)), 0)
            if are_few(states, mlp.gate_proj, most):
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
    original: Fused, query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any
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
