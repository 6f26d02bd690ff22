"""Linear layers of the same inputs that one kernel computes for few rows, where that is faster than
one kernel each.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.cuda.flash_kernels import HALF
from hf_slospec.cuda.graphs import capturer_for, replayed_s
from hf_slospec.model.linear_overrides import Override
from hf_slospec.model.version import PLAIN

logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # attributes of attention layers in transformers
MEASURED_BYTES = 2**28  # weights of timed layers: more than caches hold
WORTHWHILE = 0.97  # share of the time of separate kernels
TOLERANCE = 0.02  # relative; two roundings of bf16 are 0.008

# Outputs of a kernel, and of what it replaces.
OutputPairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
# Takes a layer or a group of layers, and states.
Compute = Callable[[Any, torch.Tensor], Sequence[torch.Tensor]]


class Fusion(NamedTuple):
    """One kernel for a layer or a group, and the operators that it replaces."""

    fused: Compute
    plain: Compute


class JointProjections:
    """Query, key and value projections of one attention layer: the first one computes them all, and
    the others return the stored outputs.
    """

    def __init__(self, group: Sequence[nn.Linear], num_rows: int):
        """Use one kernel for the layers of a group and at most ``num_rows`` rows."""
        self.group = group
        self._num_rows = num_rows
        # States, their version and the output, by layer.
        self._outputs: dict[nn.Module, tuple[torch.Tensor, int | None, torch.Tensor]] = {}

    def __call__(self, original: Override, layer: Any, *given: Any, **named: Any) -> Any:
        """Return the output of one of the layers."""
        states = given[0] if len(given) == 1 and not named else None
        output = self._outputs.pop(layer, None)
        if output is not None and output[0] is states and output[1] == _version(states):
            return output[2]
        if states is None or layer is not self.group[0]:
            return original(layer, *given, **named)
        if self._outputs:  # another layer was replaced, or is not called with these states
            self._num_rows = 0
            self._outputs.clear()
        if not _is_group(self.group, states) or not are_few(states, layer, self._num_rows):
            return original(layer, states)
        outputs = [
            out.view(*states.shape[:-1], out.shape[-1])
            for out in _joint(self.group, states.flatten(0, -2))
        ]
        for other, out in zip(self.group[1:], outputs[1:], strict=True):
            self._outputs[other] = states, _version(states), out
        return outputs[0]


def joint_rows(model: nn.Module) -> dict[Hashable, int]:
    """Return for up to how many rows joint projections are faster, by the layers' shapes."""
    return max_rows(Fusion(_joint, _separate), [(group, group) for group in _groups_in(model)])


def joint_projections(
    model: nn.Module, num_rows: Mapping[Hashable, int]
) -> dict[nn.Module, JointProjections]:
    """Return the projections that are to be joined for ``num_rows`` by shape, by layer."""
    joined = [
        JointProjections(group, num_rows[shape_of(group)])
        for group in _groups_in(model)
        if num_rows.get(shape_of(group))
    ]
    return {layer: projections for projections in joined for layer in projections.group}


def are_few(states: torch.Tensor, layer: nn.Linear, num_rows: int) -> bool:
    """Return whether states are at most ``num_rows`` rows of a layer's inputs, and laid out as the
    kernels read them.
    """
    is_right = states.dim() > 1 and states.shape[-1] == layer.in_features and states.is_contiguous()
    return is_right and 0 < states.numel() <= num_rows * layer.in_features


def is_plain(layer: Any, states: torch.Tensor) -> bool:
    """Return whether a layer computes ``F.linear`` of its weight and bias, without hooks."""
    hooks = nn.modules.module
    return (
        type(layer) is nn.Linear
        and states.dtype in HALF
        and all(
            type(tensor) in PLAIN
            and (tensor.dtype, tensor.device) == (states.dtype, states.device)
            and tensor.is_contiguous()
            for tensor in (layer.weight, layer.bias)
            if tensor is not None
        )
        and not ("forward" in layer.__dict__ or hasattr(layer, "_hf_hook"))
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
    )


def shape_of(linears: Sequence[nn.Linear]) -> Hashable:
    """Return the shapes of a group of layers; groups of equal shapes are measured once."""
    return tuple((layer.in_features, layer.out_features, layer.bias is None) for layer in linears)


def max_rows(
    fusion: Fusion, layers: Iterable[tuple[Any, Sequence[nn.Linear]]]
) -> dict[Hashable, int]:
    """Return the largest number of rows, of those that fill a tile, for which a fusion is right and
    faster; 0: none.

    Args:
        fusion: the kernel and what it replaces.
        layers: what its functions take, and the linear layers in it.

    Returns:
        The number of rows, by the linear layers' shape.
    """
    from hf_slospec.cuda.few_row_kernels import MAX_ROWS, MIN_TILE_ROWS

    by_shape: dict[Hashable, list[tuple[Any, Sequence[nn.Linear]]]] = {}
    for each in layers:
        by_shape.setdefault(shape_of(each[1]), []).append(each)
    limits = dict.fromkeys(by_shape, 0)
    for shape, alike in by_shape.items():
        for num_rows in (MIN_TILE_ROWS, MAX_ROWS):
            if (why := why_not(_try_fusion(fusion, alike, num_rows))) is not None:
                logger.debug("layers are not computed by one kernel: %s", why)
                break
            limits[shape] = num_rows
    return limits


def _try_fusion(
    fusion: Fusion, layers: Sequence[tuple[Any, Sequence[nn.Linear]]], num_rows: int
) -> OutputPairs:
    """Yield outputs for each of some layers of one shape; raise RuntimeError if the fusion is slower."""
    linears = layers[0][1]
    states = random_like(linears[0].weight, num_rows, linears[0].in_features)
    for layer, _ in layers:
        yield from zip(fusion.fused(layer, states), fusion.plain(layer, states), strict=True)
    num_timed = -(-MEASURED_BYTES // sum(linear.weight.nbytes for linear in linears))
    if not is_faster(fusion, [layer for layer, _ in layers[:num_timed]], states):
        raise RuntimeError("separate kernels are faster")


@torch.no_grad()
def why_not(outputs: OutputPairs) -> str | None:
    """Return why a kernel cannot replace other operators, given outputs for the same inputs; None
    if it can.
    """
    try:
        for ours, plain in outputs:
            error = (ours.float() - plain.float()).norm()
            size = plain.float().norm()
            if not (error <= TOLERANCE * size and size.isfinite()):
                return f"it is off by {float(error):.2g} of {float(size):.2g}"
    except Exception as error:  # noqa: BLE001  layers of any signature, and Triton fails in many ways
        return repr(error)
    return None


def random_like(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random values of a weight's dtype, the same in each call."""
    draw = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(shape, generator=draw, dtype=weight.dtype, device=weight.device)


def is_faster(fusion: Fusion, layers: Sequence[Any], states: torch.Tensor) -> bool:
    """Return whether one kernel is faster than the operators that it replaces, in captured graphs.

    Outside of graphs the host's time counts, of which one kernel needs less anyway.
    """
    if (capturer := _capturer(states.device)) is None:
        return False
    fused_s, plain_s = (
        replayed_s(capturer, functools.partial(_run, compute, layers, states), states.device)
        for compute in fusion
    )
    return fused_s <= WORTHWHILE * plain_s


# One stream per device: libraries keep a workspace for each.
_capturer = functools.cache(capturer_for)


def _run(compute: Compute, layers: Sequence[Any], states: torch.Tensor) -> None:
    for layer in layers:
        compute(layer, states)


def _groups_in(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the projections of each attention layer that one kernel can compute."""
    for module in model.modules():
        group: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
        if type(group[0]) is nn.Linear and _is_group(group, group[0].weight):
            yield group


def _is_group(group: Sequence[Any], states: torch.Tensor) -> bool:
    """Return whether one kernel can compute these layers for such states."""
    return (
        all(is_plain(layer, states) for layer in group)
        and len({(layer.in_features, layer.bias is None) for layer in group}) == 1
    )


def _version(states: torch.Tensor | None) -> int | None:
    """Return the count of writes to a tensor; None for inference tensors, which count none."""
    return None if states is None or states.is_inference() else states._version


def _joint(group: Sequence[nn.Linear], states: torch.Tensor) -> list[torch.Tensor]:
    from hf_slospec.cuda.few_row_kernels import joint_products

    return joint_products(
        states, [layer.weight for layer in group], [layer.bias for layer in group]
    )


def _separate(group: Sequence[nn.Linear], states: torch.Tensor) -> list[torch.Tensor]:
    return [F.linear(states, layer.weight, layer.bias) for layer in group]
