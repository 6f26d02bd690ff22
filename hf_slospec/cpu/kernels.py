"""CPU kernels for linear layers of eager forwards that read packed weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from hf_slospec.cpu import operators
from hf_slospec.cpu.quantised import DENSE, PackedMatrix, dense
from hf_slospec.model.machine import native_dtypes

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 8  # tokens of a forward for which libraries may optimize a packed layout
# Token counts for which a kernel must agree with torch's before it is used.
TRIED_TOKENS = (1, 3, 8, 40, 300)
TOLERANCE = 0.05  # relative error up to which kernels agree; above rounding in any dtype


class Matrix(Protocol):
    """A packed copy of a weight; calls multiply inputs by the weight."""

    num_bytes: int  # bytes of the copy
    num_rounded: int  # elements that the copy holds only approximately

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``.  [num_tokens, inputs] -> [num_tokens, outputs], in
        the input's dtype
        """


# Packs a contiguous weight [outputs, inputs]; raises OverflowError if the format cannot hold the
# values.
Kernel = Callable[[torch.Tensor], Matrix]


class Blocks:
    """The kernels of packed.hpp, once their library was built on this machine."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        if not operators.library_path().exists():
            raise RuntimeError("the library of the kernels was not built yet")
        operators.load()
        self._packed = PackedMatrix(dense(weight))
        self.num_bytes = self._packed.num_bytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._packed(input, bias)


class OneDNN:
    """oneDNN's kernels, which torch's compiler uses for frozen weights in half precision."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_tokens = len(input)
        # Padded, as oneDNN caches half a megabyte or more for each number of tokens.
        if missing := -num_tokens % granularity(num_tokens):
            input = F.pad(input, (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, bias, "none", [], ""
        )
        return out[:num_tokens] if missing else out


class MKL:
    """MKL's kernels, which torch's compiler uses for frozen weights in fp32."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TYPICAL_TOKENS)
        # Stands in for the weight, of which the operator reads only the shape.
        self.sizes = weight.new_empty(1).expand(weight.shape)
        self.num_bytes = weight.nbytes  # MKL reserves more, but writes no more

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The packed layout serves any number of tokens, but the operator reads it only if its last
        # argument is the input's number of tokens.
        out: torch.Tensor = torch.ops.mkl._mkl_linear(
            input, self.packed, self.sizes, bias, len(input)
        )
        return out


class FBGEMM:
    """FBGEMM's kernels for fp16 weights, which multiply in fp32 and so are more precise than
    kernels that round inputs to bf16.
    """

    def __init__(self, weight: torch.Tensor):
        if not float(weight.abs().max()) <= torch.finfo(torch.float16).max:  # NaN is refused, too
            raise OverflowError("fp16 cannot hold the weight")
        self.num_rounded = int((weight.half().to(weight.dtype) != weight).sum())
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(input.float(), self.packed)
        return (out if bias is None else out.add_(bias)).to(input.dtype)


# By name, the fastest ones first.
PACKING: dict[str, Kernel] = {"Blocks": Blocks, "MKL": MKL, "OneDNN": OneDNN, "FBGEMM": FBGEMM}
# Dtypes of the weights that a kernel takes, by its name.
DTYPES = {
    "Blocks": tuple(DENSE),
    "MKL": (torch.float32,),
    "OneDNN": (torch.float32, torch.bfloat16, torch.float16),
    "FBGEMM": (torch.bfloat16, torch.float16),
}


def granularity(num_tokens: int) -> int:
    """Return the step by which ``num_tokens`` is rounded up to a padded number of tokens; padding
    adds at most an eighth.
    """
    return 1 << max(num_tokens.bit_length() - 4, 0) if num_tokens < 512 else 64


@functools.cache
def works(name: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel of PACKING is correct in this dtype on this machine."""
    if dtype not in DTYPES[name]:
        return False
    make = PACKING[name]
    weight = torch.linspace(-1, 1, 96 * 64, device="cpu").sin().view(96, 64).to(dtype)
    try:
        matrix = make(weight)
        return all(_agrees(matrix, weight, num_tokens) for num_tokens in TRIED_TOKENS)
    except (AttributeError, OSError, RuntimeError, OverflowError) as error:
        # Missing from this torch, or refused for this CPU.
        logger.debug("kernel %s cannot be used in %s: %s", name, dtype, error)
        return False


def _agrees(matrix: Matrix, weight: torch.Tensor, num_tokens: int) -> bool:
    values = torch.linspace(-1, 1, num_tokens * weight.shape[1], device="cpu").cos()
    tokens = values.view(num_tokens, -1).to(weight.dtype)
    plain = F.linear(tokens.double(), weight.double())
    return bool((matrix(tokens, None).double() - plain).norm() <= TOLERANCE * plain.norm())


SMALL_BYTES = 2**18  # bytes of a weight; smaller ones stay in caches, where packing gains little


def kernel_for(weight: torch.Tensor) -> str | None:
    """Return the name of the fastest kernel in PACKING for a weight; None: torch's own."""
    is_native = native_dtypes().get(weight.dtype, True)
    if is_native and weight.nbytes < SMALL_BYTES:
        return None
    # Without native products, oneDNN emulates the dtype, as torch's kernel does: slowly.
    names = [name for name in PACKING if is_native or name != "OneDNN"]
    return next((name for name in names if works(name, weight.dtype)), None)


def packed_by(make: Kernel, weight: torch.Tensor) -> Matrix | None:
    """Return a packed copy of a weight; None if the kernel's format cannot hold its values."""
    try:
        return make(weight.contiguous())
    except OverflowError:
        return None
