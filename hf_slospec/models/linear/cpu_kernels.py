"""CPU kernels for linear layers: those that read packed weights, and torch's own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 8  # tokens per step; a packed layout may depend on it
TRIED_TOKENS = (1, 3, 8, 40, 300)  # token counts for which a kernel must agree with torch's before it is used
TOLERANCE = 0.05  # relative error; above rounding in any dtype


class Matrix(Protocol):
    """A packed weight, which multiplies inputs by it."""

    num_bytes: int  # bytes of the copy
    num_rounded: int  # elements that the copy holds only approximately

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``.  [num_tokens, inputs] -> [num_tokens, outputs], in the input's dtype"""


# Packs a contiguous weight [outputs, inputs]; raises OverflowError if the format cannot hold the values.
Kernel = Callable[[torch.Tensor], Matrix]


class Plain:
    """Torch's own kernels, which read the plain weight."""

    num_bytes = num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input, self.weight, bias)


class OneDNN:
    """oneDNN's kernels, which torch's compiler uses for frozen weights in half precision."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_tokens = len(input)  # padded to one of few sizes, as oneDNN caches half a megabyte or more for each
        if missing := -num_tokens % granularity(num_tokens):
            input = F.pad(input, (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, bias, "none", [], "")
        return out[:num_tokens] if missing else out


class MKL:
    """MKL's kernels, which torch's compiler uses for frozen weights in fp32."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TYPICAL_TOKENS)
        self.sizes = weight.new_empty(1).expand(weight.shape)  # the operator reads only the shape of the weight
        self.num_bytes = weight.nbytes  # MKL reserves more, but writes no more

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The packed weight serves any number of tokens; the operator falls back if that is not the number passed.
        out: torch.Tensor = torch.ops.mkl._mkl_linear(input, self.packed, self.sizes, bias, len(input))
        return out


class FBGEMM:
    """FBGEMM's kernels for fp16 weights, which multiply in fp32: more precise than kernels that round to bf16."""

    def __init__(self, weight: torch.Tensor):
        if not float(weight.abs().max()) <= torch.finfo(torch.float16).max:  # true for nan, too
            raise OverflowError("fp16 cannot hold the weight")
        self.num_rounded = int((weight.half().to(weight.dtype) != weight).sum())
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(input.float(), self.packed)
        return (out if bias is None else out.add_(bias)).to(input.dtype)


BLOCKS = "Blocks"  # the kernel of compiled forwards; see models/compiled/operators.py
PACKING: dict[str, Kernel] = {"OneDNN": OneDNN, "MKL": MKL, "FBGEMM": FBGEMM}
DTYPES = {
    "OneDNN": (torch.float32, torch.bfloat16, torch.float16),
    "MKL": (torch.float32,),
    "FBGEMM": (torch.bfloat16, torch.float16),
}  # dtypes of weights, by kernel


def granularity(num_tokens: int) -> int:
    """Return the number of which ``num_tokens`` is padded to a multiple; this adds an eighth at most."""
    return 1 << max(num_tokens.bit_length() - 4, 0) if num_tokens < 512 else 64


@functools.cache
def works(name: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel of PACKING gives right products in this dtype on this machine."""
    return dtype in DTYPES[name] and is_right(PACKING[name], dtype)


@functools.cache
def is_right(make: Kernel, dtype: torch.dtype) -> bool:
    """Return whether a kernel gives right products in this dtype on this machine."""
    weight = torch.linspace(-1, 1, 96 * 64, device="cpu").sin().view(96, 64).to(dtype)
    try:
        matrix = make(weight)
        return all(_agrees(matrix, weight, num_tokens) for num_tokens in TRIED_TOKENS)
    except (AttributeError, RuntimeError, OverflowError) as error:  # missing from this torch, or refused for this CPU
        logger.debug("kernel %s cannot be used in %s: %s", make, dtype, error)
        return False


def _agrees(matrix: Matrix, weight: torch.Tensor, num_tokens: int) -> bool:
    tokens = (
        torch.linspace(-1, 1, num_tokens * weight.shape[1], device="cpu").cos().view(num_tokens, -1).to(weight.dtype)
    )
    plain = F.linear(tokens.double(), weight.double())
    return bool((matrix(tokens, None).double() - plain).norm() <= TOLERANCE * plain.norm())
