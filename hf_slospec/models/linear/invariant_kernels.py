"""Matrix product as a Triton kernel in which the bits of a row do not depend on the other rows, nor on their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_slospec.models.attention.tree_kernels import on_device_of

BLOCK_M, BLOCK_N, BLOCK_K = 64, 32, 64  # rows, outputs and inputs of a tile, the same for every number of rows


def invariant_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return products of rows, each summed in fp32 in the order of its inputs.  -> [num_rows, outputs]

    Args:
        rows: [num_rows, inputs].
        weight: [outputs, inputs], of the dtype of ``rows``; a view of a transposed one is not copied.
        bias: [outputs]; None: none is added.
    """
    rows, bias = rows.contiguous(), None if bias is None else bias.contiguous()
    (num_rows, inputs), outputs = rows.shape, len(weight)
    out = rows.new_empty(num_rows, outputs)
    with on_device_of(rows):
        _product[(triton.cdiv(num_rows, BLOCK_M), triton.cdiv(outputs, BLOCK_N))](
            rows, weight, out if bias is None else bias, out, num_rows, weight.stride(0), weight.stride(1),
            INPUTS=inputs, OUTPUTS=outputs, TILE_M=BLOCK_M, TILE_N=BLOCK_N, TILE_K=BLOCK_K,
            HAS_BIAS=bias is not None, IN_FP32=rows.is_cpu,  # the interpreter has no products of bf16
            num_warps=4, num_stages=2 if rows.dtype == torch.float32 else 3,  # 48 KiB of shared memory at most
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
    is_row = row < num_rows
    is_output = output < OUTPUTS
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, INPUTS, TILE_K):
        column = first + tl.arange(0, TILE_K)
        in_row = column < INPUTS
        row_block = tl.load(
            rows + row[:, None] * INPUTS + column[None, :], mask=is_row[:, None] & in_row[None, :], other=0.0
        )
        weight_block = tl.load(
            weight + output[None, :] * output_stride + column[:, None] * input_stride,
            mask=is_output[None, :] & in_row[:, None], other=0.0,
        )  # fmt: skip
        if IN_FP32:
            row_block = row_block.to(tl.float32)
            weight_block = weight_block.to(tl.float32)
        sums = tl.dot(row_block, weight_block, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    is_stored = is_row[:, None] & is_output[None, :]
    tl.store(out + row[:, None] * OUTPUTS + output[None, :], sums.to(out.dtype.element_ty), mask=is_stored)
