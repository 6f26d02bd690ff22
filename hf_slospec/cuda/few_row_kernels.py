"""Triton kernels that multiply few rows by several weights at once, as fast as memory delivers the
weights, and the exact product of ``exact.py``.

A layer that reads megabytes of weights takes some ten microseconds on a data-center GPU, a quarter
or more of which starts and ends the kernel; one kernel for several layers does that once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_slospec.cuda.fused_kernels import activated
from hf_slospec.cuda.tree_kernels import load_block, on_device_of

MAX_ROWS = 64  # rows of the larger tile; inputs have no more
MAX_WEIGHTS = 3  # weights of one kernel: those of query, key and value projections
MIN_TILE_ROWS = 16  # fewest rows (M) of a tensor-core matrix product
TILE_OUTPUTS = 64  # outputs (N) of a tile
TILE_INPUTS = 128  # inputs (K) that a tile adds up at a time


def tile_rows(num_rows: int) -> int:
    """Return the tile's number of rows for this many rows: one of two, as each is compiled."""
    return MIN_TILE_ROWS if num_rows <= MIN_TILE_ROWS else MAX_ROWS


def joint_products(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return ``rows @ weight.T + bias`` for each of several weights, summed in fp32.  -> [num_rows,
    outputs] each

    Args:
        rows: [num_rows, inputs] in half precision, contiguous; at most ``MAX_ROWS``.
        weights: at most ``MAX_WEIGHTS``, [outputs, inputs] each, contiguous, of the dtype of
            ``rows``.
        biases: [outputs] for each, contiguous; all of them or none.
    """
    num_rows, inputs = rows.shape
    outs = [rows.new_empty(num_rows, len(weight)) for weight in weights]
    sizes = [len(weight) for weight in weights] + [0] * (MAX_WEIGHTS - len(weights))
    has_bias = biases[0] is not None
    added = [out if bias is None else bias for out, bias in zip(outs, biases, strict=True)]
    pointers = [
        tensors[min(index, len(tensors) - 1)]
        for tensors in (weights, added, outs)
        for index in range(MAX_WEIGHTS)
    ]
    num_tiles = [triton.cdiv(size, TILE_OUTPUTS) for size in sizes]
    with on_device_of(rows):
        _joint[(sum(num_tiles),)](
            rows, *pointers, *sizes, *num_tiles[:2], num_rows, inputs,
            TILE_M=tile_rows(num_rows), TILE_N=TILE_OUTPUTS, TILE_K=TILE_INPUTS, HAS_BIAS=has_bias,
            IN_FP32=rows.is_cpu, num_warps=4, num_stages=4,
        )  # fmt: skip
    return outs


def gated_product(
    rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int
) -> torch.Tensor:
    """Return ``activation(rows @ gate.T) * (rows @ up.T)``, rounded as separate operators do.  ->
    [num_rows, outputs]

    Args:
        rows: [num_rows, inputs] in half precision, contiguous; at most ``MAX_ROWS``.
        gate: [outputs, inputs], contiguous, of the dtype of ``rows``.
        up: [outputs, inputs], contiguous, of the dtype of ``rows``.
        activation: as :func:`~hf_slospec.cuda.fused_kernels.gated_activation` takes it.
    """
    (num_rows, inputs) = rows.shape
    outputs = len(gate)
    out = rows.new_empty(num_rows, outputs)
    with on_device_of(rows):
        _gated[(triton.cdiv(outputs, TILE_OUTPUTS),)](
            rows, gate, up, out, outputs, num_rows, inputs,
            TILE_M=tile_rows(num_rows), TILE_N=TILE_OUTPUTS, TILE_K=TILE_INPUTS, ACTIVATION=activation,
            IN_FP32=rows.is_cpu, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _store_tile(
    rows, weight, bias, out, row, output, num_rows, outputs, inputs, output_stride, input_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, HAS_BIAS: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Write one tile of ``rows @ weight.T + bias``; sums add the inputs in ascending order."""
    is_row = row < num_rows
    is_output = output < outputs
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, inputs, TILE_K):
        column = first + tl.arange(0, TILE_K)
        is_column = column < inputs
        sums = tl.dot(
            load_block(rows, row, column, is_row, is_column, inputs, 1, IN_FP32),
            load_block(weight, column, output, is_column, is_output, input_stride, output_stride, IN_FP32),
            sums, input_precision="ieee",
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * outputs + output[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _joint(
    rows, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, out_0, out_1, out_2, outputs_0, outputs_1, outputs_2,
    num_tiles_0, num_tiles_1, num_rows, inputs,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, HAS_BIAS: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    weight = weight_0
    bias = bias_0
    out = out_0
    outputs = outputs_0
    if tile >= num_tiles_0 + num_tiles_1:
        weight = weight_2
        bias = bias_2
        out = out_2
        outputs = outputs_2
        tile -= num_tiles_0 + num_tiles_1
    elif tile >= num_tiles_0:
        weight = weight_1
        bias = bias_1
        out = out_1
        outputs = outputs_1
        tile -= num_tiles_0
    output = tile.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    _store_tile(
        rows, weight, bias, out, tl.arange(0, TILE_M), output, num_rows, outputs, inputs, inputs, 1,
        TILE_M, TILE_N, TILE_K, HAS_BIAS, IN_FP32,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _gated(
    rows, gate, up, out, outputs, num_rows, inputs,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, ACTIVATION: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    row = tl.arange(0, TILE_M)
    is_row = row < num_rows
    is_output = output < outputs
    gates = tl.zeros([TILE_M, TILE_N], tl.float32)
    factors = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, inputs, TILE_K):
        column = first + tl.arange(0, TILE_K)
        is_column = column < inputs
        states = load_block(rows, row, column, is_row, is_column, inputs, 1, IN_FP32)
        gate_block = load_block(gate, column, output, is_column, is_output, 1, inputs, IN_FP32)
        gates = tl.dot(states, gate_block, gates)
        up_block = load_block(up, column, output, is_column, is_output, 1, inputs, IN_FP32)
        factors = tl.dot(states, up_block, factors)
    dtype = out.dtype.element_ty
    active = activated(gates.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    place = row[:, None] * outputs + output[None, :]
    product = active * factors.to(dtype).to(tl.float32)
    tl.store(out + place, product.to(dtype), mask=is_row[:, None] & is_output[None, :])


# Tile of `invariant_product`: rows, outputs and inputs, the same for every number of rows.
BLOCK_M = 64
BLOCK_N = 32
BLOCK_K = 64


def invariant_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``rows @ weight.T + bias``, summed in fp32 in an order that does not depend on the
    number of rows.  -> [num_rows, outputs]

    Args:
        rows: [num_rows, inputs].
        weight: [outputs, inputs], of the dtype of ``rows``; it may be a transposed view, which is
            not copied.
        bias: [outputs]; None: none is added.
    """
    rows = rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    (num_rows, inputs) = rows.shape
    outputs = len(weight)
    out = rows.new_empty(num_rows, outputs)
    with on_device_of(rows):
        _product[(triton.cdiv(num_rows, BLOCK_M), triton.cdiv(outputs, BLOCK_N))](
            rows, weight, out if bias is None else bias, out, num_rows, weight.stride(0), weight.stride(1),
            INPUTS=inputs, OUTPUTS=outputs, TILE_M=BLOCK_M, TILE_N=BLOCK_N, TILE_K=BLOCK_K,
            # Triton's interpreter, which runs on CPU tensors, has no products of bf16.
            HAS_BIAS=bias is not None, IN_FP32=rows.is_cpu,
            # The tiles of all stages take at most 48 KiB of shared memory.
            num_warps=4, num_stages=2 if rows.dtype == torch.float32 else 3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows, weight, bias, out, num_rows, output_stride, input_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    output = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    _store_tile(
        rows, weight, bias, out, row, output, num_rows, OUTPUTS, INPUTS, output_stride, input_stride,
        TILE_M, TILE_N, TILE_K, HAS_BIAS, IN_FP32,
    )  # fmt: skip
