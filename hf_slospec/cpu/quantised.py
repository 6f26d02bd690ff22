"""Quantised weights that stay packed: codes of 4, 5, 6 or 8 bits with a scale, and perhaps a
minimum, for every 16 or 32 inputs.

``quantised.hpp`` multiplies with them. GGUF's types are read from their blocks without rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.errors import UnsupportedModelError

LANES = 16  # outputs per block
GROUP = 32  # inputs whose codes are stored together
SUPER = 256  # inputs of a block of GGUF's K types


class Codes(NamedTuple):
    """A weight [outputs, inputs] as numbers: ``(code - zero) * scale * step - minimum * min_step``.

    Every ``span`` inputs have a step and a min_step, every ``span * shared`` a scale and a minimum.
    """

    bits: int  # 4, 5, 6 or 8; codes of 8 bits are signed, others are not
    codes: torch.Tensor  # [outputs, inputs] uint8, or int8 if they are signed
    scales: torch.Tensor  # [outputs, inputs / span / shared] fp16 or fp32
    zero: int = 0
    span: int = GROUP
    shared: int = 1
    steps: torch.Tensor | None = None  # [outputs, inputs / span] int8; None: all are 1
    minima: torch.Tensor | None = None  # as ``scales``; None: all are 0
    min_steps: torch.Tensor | None = None  # as ``steps``


class QuantisedMatrix:
    """A quantised weight, packed for the kernel of quantised.hpp."""

    num_rounded = 0

    def __init__(self, weight: Codes):
        """Pack a weight; the operators' library must be loaded.

        Raises:
            OverflowError: the number of inputs is no multiple of 32.
        """
        self.outputs, self.inputs = weight.codes.shape
        if self.inputs % GROUP:
            raise OverflowError(f"no groups of {GROUP} in {self.inputs} inputs")
        packed = _packed(weight.codes, weight.bits)
        per_span = (weight.scales, weight.steps, weight.minima, weight.min_steps)
        kept = [packed, *(None if each is None else _by_block(each) for each in per_span)]
        names = "codes", "scales", "steps", "minima", "min_steps"
        self.tensors = {
            name: tensor for name, tensor in zip(names, kept, strict=True) if tensor is not None
        }
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.bits = weight.bits
        self.id: int = torch.ops.hf_slospec.new_quantised(
            weight.bits, weight.zero, self.outputs, weight.span, weight.shared, *kept
        )
        weakref.finalize(self, torch.ops.hf_slospec.delete_quantised, self.id)

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``, of which only the output is rounded.  [..., inputs]
        -> [..., outputs] in the input's dtype
        """
        out: torch.Tensor = torch.ops.hf_slospec.quantised_product(input, self.id, bias)
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight.  [...] int64 -> [..., inputs] fp32"""
        found: torch.Tensor = torch.ops.hf_slospec.quantised_rows(indices.flatten(), self.id)
        return found.view(*indices.shape, self.inputs)

    def dequantised(self) -> torch.Tensor:
        """Return the weight.  -> [outputs, inputs] fp32"""
        return self.rows(torch.arange(self.outputs, device="cpu"))


def _by_block(values: torch.Tensor) -> torch.Tensor:
    """Return [outputs, n] as [blocks, n, LANES], with zeros behind the last output."""
    padded = F.pad(values, (0, 0, 0, -len(values) % LANES))
    return padded.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes in the layout of quantised.hpp.  [outputs, inputs] -> [blocks, groups, bytes]"""
    padded = F.pad(codes, (0, 0, 0, -len(codes) % LANES))
    num_blocks, num_groups = len(padded) // LANES, codes.shape[1] // GROUP
    if bits == 8:
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
    return flat.sum(-1, dtype=torch.int32).permute(0, 2, 3, 1).contiguous()


def quantise(weight: torch.Tensor, bits: int) -> Codes:
    """Quantise a weight [outputs, inputs] to 8 or 4 bits, with a scale for every 32 inputs of an
    output, as GGUF's types Q8_0 and Q4_0 do.

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
        return Codes(8, codes.to(torch.int8).view(outputs, inputs), scales.half())
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # with its sign
    scales = largest / -8  # the largest one gets the code 0
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15)
    return Codes(4, codes.to(torch.uint8).view(outputs, inputs), scales[..., 0].half(), zero=8)


def _halves(blocks: np.ndarray) -> torch.Tensor:
    """Return the two bytes at the end of an axis as fp16."""
    return torch.from_numpy(blocks.copy().view(np.float16).astype(np.float16)).squeeze(-1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the lower nibbles of a block, then its upper ones.  [..., n] -> [..., 2 * n]"""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q8_0(blocks: np.ndarray) -> Codes:
    codes = blocks[..., 2:].view(np.int8)
    return Codes(8, _flat(codes), _halves(blocks[..., :2]))


def _q4_0(blocks: np.ndarray) -> Codes:
    return Codes(4, _flat(_nibbles(blocks[..., 2:])), _halves(blocks[..., :2]), zero=8)


def _q4_1(blocks: np.ndarray) -> Codes:
    codes = _flat(_nibbles(blocks[..., 4:]))
    return Codes(4, codes, _halves(blocks[..., :2]), minima=-_halves(blocks[..., 2:4]))


def _with_fifth(blocks: np.ndarray) -> np.ndarray:
    """Return codes of 5 bits: 4 bytes of fifth bits, then 16 bytes of nibbles."""
    fifth = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    return _nibbles(blocks[..., 4:]) | fifth << 4


def _q5_0(blocks: np.ndarray) -> Codes:
    return Codes(5, _flat(_with_fifth(blocks[..., 2:])), _halves(blocks[..., :2]), zero=16)


def _q5_1(blocks: np.ndarray) -> Codes:
    codes = _flat(_with_fifth(blocks[..., 4:]))
    return Codes(5, codes, _halves(blocks[..., :2]), minima=-_halves(blocks[..., 2:4]))


def _six_bit_steps(packed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8 steps of scales and of minima that 12 bytes of a block hold in 6 bits each."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    return _flat(scales.view(np.int8)), _flat(minima.view(np.int8))


def _of_k_type(bits: int, blocks: np.ndarray, codes: np.ndarray) -> Codes:
    steps, min_steps = _six_bit_steps(blocks[..., 4:16])
    return Codes(
        bits,
        _flat(codes),
        _halves(blocks[..., :2]),
        shared=SUPER // GROUP,
        steps=steps,
        minima=_halves(blocks[..., 2:4]),
        min_steps=min_steps,
    )


def _q4_k(blocks: np.ndarray) -> Codes:
    nibbles = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return _of_k_type(4, blocks, nibbles)


def _q5_k(blocks: np.ndarray) -> Codes:
    nibbles = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))
    # Bit i of a byte belongs to the i-th 32 inputs.
    fifth = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    codes = nibbles.reshape(*blocks.shape[:-1], 8, 32) | np.swapaxes(fifth, -1, -2) << 4
    return _of_k_type(5, blocks, codes)


def _q6_k(blocks: np.ndarray) -> Codes:
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))  # halves of 128 inputs
    packed = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    high = packed >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    codes = low | high.reshape(*shape, 2, 128) << 4
    return Codes(
        6,
        _flat(codes),
        _halves(blocks[..., 208:]),
        zero=32,
        span=16,
        shared=SUPER // 16,
        steps=_flat(blocks[..., 192:208].view(np.int8)),
    )


def _flat(values: np.ndarray) -> torch.Tensor:
    """Return [outputs, blocks, ...] as a tensor [outputs, n]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(len(values), -1)))


# Name of a GGUF type -> bytes of a block, and what reads [outputs, blocks, bytes] uint8.
GGUF_TYPES: dict[str, tuple[int, Callable[[np.ndarray], Codes]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}


def codes_of_gguf(name: str, data: Any) -> Codes:
    """Return a weight of a GGUF file as it is.

    Args:
        name: the GGUF type, such as "Q4_K".
        data: [outputs, bytes] uint8, as ``gguf.GGUFReader`` returns it.

    Raises:
        UnsupportedModelError: the type is not among ``GGUF_TYPES``.
    """
    if name not in GGUF_TYPES:
        raise UnsupportedModelError(
            f"weights of the GGUF type {name} are not supported; use one of {', '.join(GGUF_TYPES)}"
        )
    num_bytes, read = GGUF_TYPES[name]
    return read(np.asarray(data).reshape(len(data), -1, num_bytes))
