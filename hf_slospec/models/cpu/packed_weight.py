"""A layer's weight as a kernel reads it, kept up to date with the weight, or in its place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.models.cpu.kernel_choice import PLAIN, choose, packed_by
from hf_slospec.models.cpu.kernels import DTYPES, PACKING, Matrix

SAMPLES = 256  # elements of a weight compared to find changes that torch does not count
MANY_OUTPUTS = 16384  # output layers have more; one output may be changed alone, for a new token, so each is sampled
META = torch.device("meta")  # of a released weight, as accelerate marks weights that are stored elsewhere


class PackedWeight:
    """A copy of a layer's weight as its kernel reads it, and the state of the weight it was made from."""

    def __init__(self, layer: nn.Module, name: str):
        self.layer, self.name = layer, name
        self.make()

    def make(self) -> None:
        """Make the copy of the layer's present weight."""
        weight: Any = self.layer._parameters.get(self.name)
        self.weight, self.choice = weight, PLAIN
        self.matrices = list[Matrix]()  # one, or one per expert; none where torch's own kernels are used
        if weight is None or not is_usual(weight):
            return
        with torch.no_grad():
            self.samples, self.version, self.address = _samples(weight), weight._version, weight.data_ptr()
            plain = matrices_of(self.layer, weight)
            self.choice = choose(plain)
            if self.choice.kernel is not None:
                packed = [packed_by(PACKING[self.choice.kernel], each) for each in plain]
                self.matrices = [matrix for matrix in packed if matrix is not None]
                if len(self.matrices) != len(plain):  # some values are out of the kernel's range
                    self.matrices = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def num_rounded(self) -> int:
        """Elements that the copy holds only approximately."""
        return sum(matrix.num_rounded for matrix in self.matrices)

    def update(self) -> None:
        """Make the copy anew if torch has counted a change of it."""
        weight: Any = self.layer._parameters.get(self.name)  # in every forward: the attribute takes five times as long
        if not self._is_of(weight):
            self.make()

    def renew(self) -> None:
        """Make the copy anew if samples differ: torch counts no writes to ``weight.data`` (merged adapters)."""
        weight: Any = self.layer._parameters.get(self.name)
        if self._is_of(weight) and weight.device == META:
            return
        if not (self._is_of(weight) and weight.is_contiguous() and torch.equal(self.samples, _samples(weight))):
            self.make()

    def product(self, input: torch.Tensor, bias: torch.Tensor | None, index: int = 0) -> torch.Tensor:
        """Return the product with the weight, or with one expert's.  [num_tokens, inputs] -> [num_tokens, outputs]"""
        if self.matrices and len(input) and (self.choice.packs(len(input)) or self.weight.device == META):
            return self.matrices[index](input, bias)
        if self.weight.device == META:  # and no tokens
            return input.new_empty(0, self.weight.shape[-1 if is_transposed(self.layer) else -2])
        return F.linear(input, matrices_of(self.layer, self.weight)[index], bias)

    def release(self) -> None:
        """Replace the layer's weight by one on the meta device; the layer computes with the copy from now on."""
        weight = self.weight
        if self.matrices and weight.device != META:
            packed = self._unpacked()
            places = (packed != weight).nonzero(as_tuple=True)  # what the kernel has rounded
            self.rounded = places, weight.detach()[places].clone()
            self._set_weight(nn.Parameter(torch.empty_like(weight, device=META), weight.requires_grad))

    def restore(self) -> None:
        """Give the layer its weight back, with the very values that it had."""
        if self.weight.device == META:
            weight = self._unpacked()
            places, values = self.rounded
            weight[places] = values
            self._set_weight(nn.Parameter(weight, self.weight.requires_grad))
            self.samples = _samples(self.weight)

    def _unpacked(self) -> torch.Tensor:
        matrices = [matrix.unpacked().to(self.weight.dtype) for matrix in self.matrices]
        matrices = [matrix.T for matrix in matrices] if is_transposed(self.layer) else matrices
        return torch.stack(matrices) if self.weight.dim() == 3 else matrices[0].contiguous()

    def _set_weight(self, weight: nn.Parameter) -> None:
        self.layer._parameters[self.name] = self.weight = weight
        self.version, self.address = weight._version, weight.data_ptr()

    def _is_of(self, weight: Any) -> bool:
        if weight is None or self.weight is not weight:
            return False
        return bool(self.version == weight._version and self.address == weight.data_ptr())


def matrices_of(layer: nn.Module, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices of a layer's weight, one or one per expert.  -> [outputs, inputs] each"""
    matrices = list(weight.detach().unbind(0)) if weight.dim() == 3 else [weight.detach()]
    return [matrix.T for matrix in matrices] if is_transposed(layer) else matrices


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the layer stores its weights as [inputs, outputs]."""
    return bool(getattr(layer, "is_transposed", isinstance(layer, Conv1D)))


def is_usual(weight: nn.Parameter) -> bool:
    """Return whether a weight is a dense parameter on the CPU that kernels can pack."""
    is_dense = weight.device.type == "cpu" and weight.layout is torch.strided and weight.is_contiguous()
    is_own = type(weight) is nn.Parameter and not weight.is_inference()
    return bool(is_own and is_dense and weight.numel() > 0 and any(weight.dtype in own for own in DTYPES.values()))


def _samples(weight: nn.Parameter) -> torch.Tensor:
    every = max(weight.numel() // SAMPLES, 1) | 1
    if len(weight) > MANY_OUTPUTS:
        every = min(every, max(weight.shape[1] - 1, 1))
    return weight.detach().view(-1)[::every].clone()
