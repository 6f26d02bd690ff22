"""Packed weights that stay packed: codes of 4, 5, 6 or 8 bits with a scale, and perhaps a
minimum, for every 16 or 32 inputs.

``packed.hpp`` multiplies with them. ``formats.py`` makes them of GGUF's and torchao's weights.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F

LANES = 16  # outputs per block
GROUP = 32  # inputs whose codes are stored together
DTYPES = torch.float32, torch.float16, torch.bfloat16  # dtypes of the inputs of products
FLOAT8 = 9  # value of Codes.bits
DENSE = {torch.bfloat16: 16, torch.float16: 17, torch.float32: 32}  # values of Codes.bits
NAMES = {4: "4 bits", 5: "5 bits", 6: "6 bits", 8: "8 bits", FLOAT8: "float8"}  # by Codes.bits


class Codes(NamedTuple):
    """A weight [outputs, inputs] as numbers: ``(code - zero) * scale * step - minimum * min_step``.

    Every ``span`` inputs have a step and a min_step, every ``span * shared`` a scale and a minimum.
    A dense weight has none of these; its products with ``span`` inputs are added to a partial sum.
    """

    bits: int  # 4, 5, 6 or 8; codes of 8 bits are signed, others are not; FLOAT8; one of DENSE
    codes: torch.Tensor  # [outputs, inputs] uint8, int8 or float8_e4m3fn; a dense weight itself
    scales: torch.Tensor | None  # [outputs, inputs / span / shared] fp16 or fp32
    zero: int = 0
    span: int = GROUP
    shared: int = 1
    steps: torch.Tensor | None = None  # [outputs, inputs / span] int8; None: all are 1
    minima: torch.Tensor | None = None  # as ``scales``; None: all are 0
    min_steps: torch.Tensor | None = None  # as ``steps``


def dense(weight: torch.Tensor, span: int | None = None) -> Codes:
    """Return a dense weight [outputs, inputs] as codes.

    ``span``: number of inputs per partial sum; None: all.
    """
    return Codes(DENSE[weight.dtype], weight, None, span=span or weight.shape[1])


class PackedMatrix:
    """A weight packed for the kernels of packed.hpp."""

    num_rounded = 0

    def __init__(self, weight: Codes, is_invariant: bool = False):
        """Pack a weight; the operators' library must be loaded.

        With ``is_invariant``, the bits of a row's products with a dense weight do not depend on the
        number of rows.

        Raises:
            OverflowError: the number of inputs is no multiple of 32, or of a dense weight in bf16,
                odd.
        """
        self.outputs, self.inputs = weight.codes.shape
        if weight.bits in DENSE.values():
            packed = _packed_dense(weight.codes)
        elif self.inputs % GROUP:
            raise OverflowError(f"no groups of {GROUP} in {self.inputs} inputs")
        else:
            packed = _packed(weight.codes, weight.bits)
        scales = weight.scales
        if weight.bits == FLOAT8 and scales is not None:
            scales = scales.float() * 256
        per_span = (scales, weight.steps, weight.minima, weight.min_steps)
        kept = [packed, *(None if each is None else _by_block(each) for each in per_span)]
        names = "codes", "scales", "steps", "minima", "min_steps"
        self.tensors = {
            name: tensor for name, tensor in zip(names, kept, strict=True) if tensor is not None
        }
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.bits = weight.bits
        self.id: int = torch.ops.hf_slospec.new_packed(
            weight.bits, weight.zero, self.outputs, self.inputs, weight.span, weight.shared,
            is_invariant, *kept,
        )  # fmt: skip
        weakref.finalize(self, torch.ops.hf_slospec.delete_packed, self.id)

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``, of which only the output is rounded.  [..., inputs]
        -> [..., outputs] in the input's dtype
        """
        out: torch.Tensor = torch.ops.hf_slospec.packed_product(input, self.id, bias)
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight.  [...] int64 -> [..., inputs] fp32"""
        found: torch.Tensor = torch.ops.hf_slospec.packed_rows(indices.flatten(), self.id)
        return found.view(*indices.shape, self.inputs)

    def dequantised(self) -> torch.Tensor:
        """Return the weight.  -> [outputs, inputs] fp32"""
        return self.rows(torch.arange(self.outputs, device="cpu"))


def _by_block(values: torch.Tensor) -> torch.Tensor:
    """Return [outputs, n] as [blocks, n, LANES], with zeros behind the last output."""
    padded = F.pad(values, (0, 0, 0, -len(values) % LANES))
    return padded.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


def _packed_dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a dense weight in the layout of packed.hpp.  [outputs, inputs] -> [blocks, inputs,
    LANES]
    """
    outputs, inputs = weight.shape
    size = 2 if weight.dtype == torch.bfloat16 else 1  # inputs that are stored together
    if inputs % size:
        raise OverflowError(f"no pairs in {inputs} inputs")
    padded = F.pad(weight.detach(), (0, 0, 0, -outputs % LANES))
    blocks = padded.reshape(-1, LANES, inputs // size, size).transpose(1, 2).contiguous()
    return blocks.view(-1, inputs, LANES)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes in the layout of packed.hpp.  [outputs, inputs] -> [blocks, groups, bytes]"""
    if bits == FLOAT8:
        codes = codes.view(torch.int8)
    padded = F.pad(codes, (0, 0, 0, -len(codes) % LANES))
    num_blocks, num_groups = len(padded) // LANES, codes.shape[1] // GROUP
    if bits >= 8:
        pairs = padded.view(num_blocks, LANES, num_groups, GROUP // 2, 2).permute(0, 2, 3, 4, 1)
        return pairs.contiguous().view(torch.uint8).view(num_blocks, num_groups, -1)
    # Input 8 * vector + 2 * place + half.
    split = padded.view(num_blocks, LANES, num_groups, 4, 4, 2).to(torch.int32)
    vector, place, half = (
        torch.arange(size, dtype=torch.int32, device="cpu").view(shape)
        for size, shape in ((4, (4, 1, 1)), (4, (4, 1)), (2, (2,)))
    )
    parts = [_joined((split & 15) << (16 * half + 4 * place), 4)]
    if bits == 5:
        parts.append(_joined((split >> 4 & 1) << (16 * half + 4 * vector + place), 1))
    if bits == 6:
        shifts = 16 * half + 2 * (4 * (vector % 2) + place)
        parts.append(_joined((split >> 4 & 3) << shifts, 2))
    return torch.cat(parts, 2).view(torch.uint8).view(num_blocks, num_groups, -1)


def _joined(shifted: torch.Tensor, num_vectors: int) -> torch.Tensor:
    """Return vectors of dwords, one per output, with the bits of all inputs that they hold.

    [blocks, LANES, groups, 4, 4, 2] int32 -> [blocks, groups, num_vectors, LANES] int32
    """
    flat = shifted.flatten(3).unflatten(3, (num_vectors, -1))
    # Different bits are set in each of them, so their sum is their union.
    joined: torch.Tensor = flat.sum(-1, dtype=torch.int32).permute(0, 2, 3, 1).contiguous()
    return joined


def quantise(weight: torch.Tensor, bits: int) -> Codes:
    """Quantise a weight [outputs, inputs] to 8 or 4 bits, with a scale for every 32 inputs of an
    output, in fp16 if that can hold them, as GGUF's types Q8_0 and Q4_0 do.

    Raises:
        OverflowError: the number of inputs is no multiple of 32.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise OverflowError(f"no groups of {GROUP} in {inputs} inputs")
    groups = weight.detach().float().view(outputs, -1, GROUP)
    if bits == 8:
        scales = groups.abs().amax(-1) / 127
        codes = (groups / scales[..., None].clamp(min=1e-30)).round().clamp(-127, 127)
        return Codes(8, codes.to(torch.int8).view(outputs, inputs), _in_fp16(scales))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # with its sign
    scales = largest / -8  # the largest one gets the code 0
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15)
    return Codes(4, codes.to(torch.uint8).view(outputs, inputs), _in_fp16(scales[..., 0]), zero=8)


def _in_fp16(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in fp16, or as they are if they are too large or too small for it."""
    halves = scales.half()
    error = torch.linalg.norm(halves.float() - scales)
    return halves if error <= 1e-3 * torch.linalg.norm(scales) else scales
