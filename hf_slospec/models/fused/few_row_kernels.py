"""Products of few rows by several weights at once, as Triton kernels that read the weights at the memory's speed.

A layer that reads megabytes takes some ten microseconds on a data-center GPU, of which a kernel's begin and end are a
quarter or more; one kernel for several layers has them once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_slospec.models.attention.tree_kernels import on_device_of
from hf_slospec.models.fused.triton_kernels import activated

MAX_ROWS, MAX_WEIGHTS = 64, 3
MIN_TILE_ROWS = 16  # rows of the smallest product of tensor cores
TILE_OUTPUTS, TILE_INPUTS = 64, 128


def tile_rows(num_rows: int) -> int:
    """Return the rows of a tile, for each of which a kernel is compiled."""
    return MIN_TILE_ROWS if num_rows <= MIN_TILE_ROWS else MAX_ROWS


def joint_products(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return products of rows by each of several weights, summed in fp32.  -> [num_rows, outputs] for each

    Args:
        rows: [num_rows, inputs] in half precision, contiguous; at most ``MAX_ROWS``.
        weights: at most ``MAX_WEIGHTS``, [outputs, inputs] each, contiguous, of the dtype of ``rows``.
        biases: [outputs] for each, contiguous; all of them or none.
    """
    num_rows, inputs = rows.shape
    outs = [rows.new_empty(num_rows, len(weight)) for weight in weights]
    sizes = [len(weight) for weight in weights] + [0] * (MAX_WEIGHTS - len(weights))
    has_bias = biases[0] is not None
    added = [out if bias is None else bias for out, bias in zip(outs, biases, strict=True)]
    pointers = [own[min(index, len(own) - 1)] for own in (weights, added, outs) for index in range(MAX_WEIGHTS)]
    num_tiles = [triton.cdiv(size, TILE_OUTPUTS) for size in sizes]
    with on_device_of(rows):
        _joint[(sum(num_tiles),)](
            rows, *pointers, *sizes, *num_tiles[:2], num_rows, inputs,
            TILE_M=tile_rows(num_rows), TILE_N=TILE_OUTPUTS, TILE_K=TILE_INPUTS, HAS_BIAS=has_bias,
            IN_FP32=rows.is_cpu, num_warps=4, num_stages=4,
        )  # fmt: skip
    return outs


def gated_product(rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """Return ``activation(rows @ gate.T) * (rows @ up.T)``, rounded as separate operators do.  -> [num_rows, outputs]

    Args:
        rows: [num_rows, inputs] in half precision, contiguous; at most ``MAX_ROWS``.
        gate: [outputs, inputs], contiguous, of the dtype of ``rows``.
        up: the same.
        activation: as :func:`~hf_slospec.models.fused.triton_kernels.gated_activation` takes it.
    """
    (num_rows, inputs), outputs = rows.shape, len(gate)
    out = rows.new_empty(num_rows, outputs)
    with on_device_of(rows):
        _gated[(triton.cdiv(outputs, TILE_OUTPUTS),)](
            rows, gate, up, out, outputs, num_rows, inputs,
            TILE_M=tile_rows(num_rows), TILE_N=TILE_OUTPUTS, TILE_K=TILE_INPUTS, ACTIVATION=activation,
            IN_FP32=rows.is_cpu, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _block(source, row, column, is_row, num_columns, IN_FP32: tl.constexpr, IS_WEIGHT: tl.constexpr):
    """Load a block of a matrix with contiguous rows, transposed if it is a weight."""
    if IS_WEIGHT:
        place = row[None, :] * num_columns + column[:, None]
        block = tl.load(source + place, mask=is_row[None, :] & (column < num_columns)[:, None], other=0.0)
    else:
        place = row[:, None] * num_columns + column[None, :]
        block = tl.load(source + place, mask=is_row[:, None] & (column < num_columns)[None, :], other=0.0)
    return block.to(tl.float32) if IN_FP32 else block  # the interpreter has no products of bf16


@triton.jit(do_not_specialize=["num_rows"])
def _joint(
    rows, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, out_0, out_1, out_2, outputs_0, outputs_1, outputs_2,
    num_tiles_0, num_tiles_1, num_rows, inputs,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, HAS_BIAS: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    weight, bias, out, outputs = weight_0, bias_0, out_0, outputs_0
    if tile >= num_tiles_0 + num_tiles_1:
        weight, bias, out, outputs = weight_2, bias_2, out_2, outputs_2
        tile -= num_tiles_0 + num_tiles_1
    elif tile >= num_tiles_0:
        weight, bias, out, outputs = weight_1, bias_1, out_1, outputs_1
        tile -= num_tiles_0
    output = tile.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    row = tl.arange(0, TILE_M)
    is_row, is_output = row < num_rows, output < outputs
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, inputs, TILE_K):
        column = first + tl.arange(0, TILE_K)
        sums = tl.dot(
            _block(rows, row, column, is_row, inputs, IN_FP32, False),
            _block(weight, output, column, is_output, inputs, IN_FP32, True), sums,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * outputs + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gated(
    rows, gate, up, out, outputs, num_rows, inputs,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, ACTIVATION: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    row = tl.arange(0, TILE_M)
    is_row, is_output = row < num_rows, output < outputs
    gates, factors = tl.zeros([TILE_M, TILE_N], tl.float32), tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, inputs, TILE_K):
        column = first + tl.arange(0, TILE_K)
        states = _block(rows, row, column, is_row, inputs, IN_FP32, False)
        gates = tl.dot(states, _block(gate, output, column, is_output, inputs, IN_FP32, True), gates)
        factors = tl.dot(states, _block(up, output, column, is_output, inputs, IN_FP32, True), factors)
    dtype = out.dtype.element_ty
    active = activated(gates.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    place = row[:, None] * outputs + output[None, :]
    product = active * factors.to(dtype).to(tl.float32)
    tl.store(out + place, product.to(dtype), mask=is_row[:, None] & is_output[None, :])
