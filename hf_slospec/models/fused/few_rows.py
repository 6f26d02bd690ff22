"""Linear layers of the same inputs that one kernel computes for few rows, where that is faster than one kernel each."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.models.attention.flash_kernels import HALF
from hf_slospec.models.device.graphs import GraphCapturer, capturer_for
from hf_slospec.models.inspection.model_changes import PLAIN

logger = logging.getLogger(__name__)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # attributes of attention layers in transformers
MEASURED_LAYERS, REPEATS = 8, 5  # their weights together do not fit into caches
WORTHWHILE = 0.97  # of the time of separate kernels
TOLERANCE = 0.02  # relative; two roundings of bf16 are 0.008

Compute = Callable[[Any, torch.Tensor], Sequence[torch.Tensor]]  # takes a layer or a group of layers, and states


class Way(NamedTuple):
    """One kernel for a layer or a group, and the operators that it replaces."""

    fused: Compute
    plain: Compute


class JointProjections:
    """Query, key and value projections: the first one computes them all, and the others return what it has kept."""

    def __init__(self, model: nn.Module):
        groups = list(_groups_in(model))
        self.max_rows = max_rows(Way(_joint, _separate), groups, [group[0] for group in groups])
        self._groups = {group[0]: group for group in groups}
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}  # states and output, by layer

    def __call__(self, original: Callable[..., Any], layer: Any, states: torch.Tensor) -> Any:
        """Return a linear layer's output; the signature is that of fused layers."""
        if (kept := self._kept.pop(layer, None)) is not None and kept[0] is states:
            return kept[1]
        group = self._groups.get(layer)
        if group is None or not are_few(states, self.max_rows) or not all(is_plain(one, states) for one in group):
            return original(layer, states)
        outputs = [out.view(*states.shape[:-1], -1) for out in _joint(group, states.flatten(0, -2))]
        self._kept |= {other: (states, out) for other, out in zip(group[1:], outputs[1:], strict=True)}
        return outputs[0]


def are_few(states: torch.Tensor, most: int) -> bool:
    """Return whether states have at most so many rows, and are laid out as the kernels read them."""
    return states.is_contiguous() and 0 < states.numel() <= most * states.shape[-1]


def is_plain(layer: Any, states: torch.Tensor) -> bool:
    """Return whether nothing but ``F.linear`` of its own weight would compute this layer."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) in PLAIN
        and (layer.weight.dtype, layer.weight.device) == (states.dtype, states.device)
        and states.dtype in HALF
        and layer.weight.is_contiguous()
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


@torch.no_grad()
def max_rows(way: Way, layers: Sequence[Any], linears: Sequence[nn.Linear]) -> int:
    """Return up to how many rows a way is right and faster for layers of these; 0: never.

    Args:
        way: the kernel and what it replaces.
        layers: what its functions take.
        linears: for each of the layers, a linear layer with its inputs.
    """
    from hf_slospec.models.fused.few_row_kernels import MAX_ROWS, MIN_TILE_ROWS

    most = 0
    try:
        for rows in (MIN_TILE_ROWS, MAX_ROWS) if layers else ():
            given = [(layer, _random(linear, rows)) for layer, linear in zip(layers, linears, strict=True)]
            if not all(_are_close(way.fused(*each), way.plain(*each)) for each in given):
                break
            if not is_faster(way, given[:MEASURED_LAYERS]):
                break
            most = rows
    except Exception as error:  # noqa: BLE001  Triton fails in many ways, and so do captures
        logger.debug("layers are not computed by one kernel: %r", error)
    return most


def is_faster(way: Way, given: Sequence[tuple[Any, torch.Tensor]]) -> bool:
    """Return whether one kernel is faster than the operators that it replaces, in captured graphs.

    Outside of graphs the host's time counts, of which one kernel needs less anyway.
    """
    if (capturer := capturer_for(given[0][1].device)) is None:
        return False
    fused_s, plain_s = (_replayed_s(capturer, compute, given) for compute in way)
    return fused_s <= WORTHWHILE * plain_s


def _replayed_s(capturer: GraphCapturer, compute: Compute, given: Sequence[tuple[Any, torch.Tensor]]) -> float:
    """Return the median seconds of a captured run over all that is given."""

    def run() -> None:
        for each in given:
            compute(*each)

    with capturer.on_stream():
        run()
    replay, times = capturer.capture(run), list[float]()
    with torch.cuda.device(given[0][1].device):
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _groups_in(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the projections of each attention layer that one kernel can compute."""
    for module in model.modules():
        group = [getattr(module, name, None) for name in PROJECTIONS]
        first: Any = group[0]
        if not all(type(layer) is nn.Linear for layer in group) or not is_plain(first, first.weight):
            continue
        kinds = {(layer.in_features, layer.bias is None) for layer in group if isinstance(layer, nn.Linear)}
        if len(kinds) == 1 and all(is_plain(layer, first.weight) for layer in group):
            yield [layer for layer in group if isinstance(layer, nn.Linear)]


def _joint(group: Sequence[nn.Linear], states: torch.Tensor) -> list[torch.Tensor]:
    from hf_slospec.models.fused.few_row_kernels import joint_products

    return joint_products(states, [layer.weight for layer in group], [layer.bias for layer in group])


def _separate(group: Sequence[nn.Linear], states: torch.Tensor) -> list[torch.Tensor]:
    return [F.linear(states, layer.weight, layer.bias) for layer in group]


def _random(linear: nn.Linear, rows: int) -> torch.Tensor:
    weight = linear.weight
    draw = torch.Generator(weight.device).manual_seed(0)
    return torch.randn(rows, linear.in_features, generator=draw, dtype=weight.dtype, device=weight.device)


def _are_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    pairs = itertools.zip_longest(found, expected)
    return all(bool((a.float() - b.float()).norm() <= TOLERANCE * b.float().norm()) for a, b in pairs)
