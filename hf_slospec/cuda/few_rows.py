"""Query, key and value projections that one kernel computes for inputs of few rows, and the trials
by which fused kernels are chosen.

The kernels are in ``few_row_kernels.py``; other fused layers in ``fused_layers.py``.
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
from hf_slospec.model.checksum import PLAIN
from hf_slospec.model.linear_overrides import Override

logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # attributes of attention layers in transformers
MEASURED_BYTES = 2**28  # bytes of weights that a timing reads: more than caches hold
WORTHWHILE = 0.97  # share of the separate kernels' time that a fused kernel may take
TOLERANCE = 0.02  # relative error of a fused kernel; two roundings to bf16 make 0.008

# Pairs of outputs for the same input: of a fused kernel, and of the operators that it replaces.
OutputPairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
# Takes a layer, or a group of layers that read the same input, and hidden states; returns outputs.
Compute = Callable[[Any, torch.Tensor], Sequence[torch.Tensor]]


class Fusion(NamedTuple):
    """A fused kernel for one layer, or for several that read the same input, and the plain
    operators that it would replace.
    """

    fused: Compute
    plain: Compute


class JointProjections:
    """Override of the query, key and value projections of one attention layer: a call of the first
    one computes all three, and calls of the others return the stored outputs.
    """

    def __init__(self, group: Sequence[nn.Linear], num_rows: int):
        """Use one kernel for the layers of a group and at most ``num_rows`` rows."""
        self.group = group
        self._num_rows = num_rows
        # Layer -> hidden states, their version, and the output that was stored for them.
        self._outputs: dict[nn.Module, tuple[torch.Tensor, int | None, torch.Tensor]] = {}

    def __call__(self, original: Override, layer: Any, *given: Any, **named: Any) -> Any:
        """Return the output of a layer: stored, computed with the others', or by ``original``."""
        states = given[0] if len(given) == 1 and not named else None
        output = self._outputs.pop(layer, None)
        if output is not None and output[0] is states and output[1] == _version(states):
            return output[2]
        if states is None or layer is not self.group[0]:
            return original(layer, *given, **named)
        if self._outputs:  # not all were used: a layer was replaced, or takes other states
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
    """Return the largest number of rows for which joint projections are faster, by the layers'
    shapes.
    """
    return max_rows(Fusion(_joint, _separate), [(group, group) for group in _groups_in(model)])


def joint_projections(
    model: nn.Module, num_rows: Mapping[Hashable, int]
) -> dict[nn.Module, JointProjections]:
    """Return the override of each projection that is computed jointly with others.

    ``num_rows``: result of :func:`joint_rows`.
    """
    joined = [
        JointProjections(group, num_rows[shape_of(group)])
        for group in _groups_in(model)
        if num_rows.get(shape_of(group))
    ]
    return {layer: projections for projections in joined for layer in projections.group}


def are_few(states: torch.Tensor, layer: nn.Linear, num_rows: int) -> bool:
    """Return whether states have at most ``num_rows`` rows, the layer's number of inputs, and the
    contiguous layout that the kernels read.
    """
    is_right = states.dim() > 1 and states.shape[-1] == layer.in_features and states.is_contiguous()
    return is_right and 0 < states.numel() <= num_rows * layer.in_features


def is_plain(layer: Any, states: torch.Tensor) -> bool:
    """Return whether a layer computes ``F.linear`` only, without hooks, in the states' dtype."""
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
    """Return the shapes of a group of layers as a key; groups with equal keys are measured once."""
    return tuple((layer.in_features, layer.out_features, layer.bias is None) for layer in linears)


def max_rows(
    fusion: Fusion, layers: Iterable[tuple[Any, Sequence[nn.Linear]]]
) -> dict[Hashable, int]:
    """Return the largest number of rows for which a fused kernel is correct and faster.

    Args:
        fusion: the kernel and the operators.
        layers: pairs of the first argument for the functions of ``fusion``, and the linear layers
            in it.

    Returns:
        The number of rows, by :func:`shape_of` the linear layers; 0: the kernel is not used.
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
    """Yield fused and plain outputs of layers with one shape, then raise RuntimeError if the fused
    kernel is not faster.
    """
    linears = layers[0][1]
    states = random_like(linears[0].weight, num_rows, linears[0].in_features)
    for layer, _ in layers:
        yield from zip(fusion.fused(layer, states), fusion.plain(layer, states), strict=True)
    num_timed = -(-MEASURED_BYTES // sum(linear.weight.nbytes for linear in linears))
    if not is_faster(fusion, [layer for layer, _ in layers[:num_timed]], states):
        raise RuntimeError("separate kernels are faster")


@torch.no_grad()
def why_not(outputs: OutputPairs) -> str | None:
    """Return why a kernel cannot replace operators: its outputs differ from theirs, or iterating
    over ``outputs`` raised an error; None if it can.
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
    """Return random values of a weight's dtype on its device, the same in each call."""
    draw = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(shape, generator=draw, dtype=weight.dtype, device=weight.device)


def is_faster(fusion: Fusion, layers: Sequence[Any], states: torch.Tensor) -> bool:
    """Return whether a fused kernel is faster than the plain operators in replays of CUDA graphs.

    Outside of graphs, the host needs longer than the device, and one kernel saves its time anyway.
    """
    if (capturer := _capturer(states.device)) is None:
        return False
    fused_s, plain_s = (
        replayed_s(capturer, functools.partial(_run, compute, layers, states), states.device)
        for compute in fusion
    )
    return fused_s <= WORTHWHILE * plain_s


# Cached, as each has a stream of its own, for which libraries keep a workspace.
_capturer = functools.cache(capturer_for)


def _run(compute: Compute, layers: Sequence[Any], states: torch.Tensor) -> None:
    for layer in layers:
        compute(layer, states)


def _groups_in(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the query, key and value projections of each attention layer that can be joined."""
    for module in model.modules():
        group: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
        if type(group[0]) is nn.Linear and _is_group(group, group[0].weight):
            yield group


def _is_group(group: Sequence[Any], states: torch.Tensor) -> bool:
    """Return whether one kernel can compute these layers for states of this dtype and device."""
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
