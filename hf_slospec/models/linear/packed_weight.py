"""Packed copies of layers' weights, kept up to date with the plain weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.models.inspection.weights_version import Digest, digest
from hf_slospec.models.linear.cpu_kernel_choice import PLAIN, choose, packed_by
from hf_slospec.models.linear.cpu_kernels import DTYPES, PACKING, Matrix


class PackedWeight:
    """A packed copy of a layer's weight, and the version of the weight that it was made from.

    ``autocast``: dtype of the copy, for forwards that compute with autocast; None: the weight's own.
    """

    def __init__(self, layer: nn.Module, name: str, autocast: torch.dtype | None = None):
        self.layer, self.name, self.autocast, self.num_made = layer, name, autocast, 0
        self.make()

    def make(self) -> None:
        """Make the copy anew from the layer's present weight."""
        weight: Any = self.layer._parameters.get(self.name)
        self.weight, self.choice = weight, PLAIN
        self.num_made += 1
        self.matrices = list[Matrix]()  # one, or one per expert; empty where torch's own kernels are used
        self.digest: Digest | None = None
        if weight is None or not can_be_packed(weight):
            return
        with torch.inference_mode(False), torch.no_grad():  # the copy may outlive the caller's inference mode
            self.digest, self.version, self.address = digest([weight]), weight._version, weight.data_ptr()
            plain = matrices_of(self.layer, weight, self.autocast)
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
        """Make the copy anew if torch has counted a change of the weight."""
        weight: Any = self.layer._parameters.get(self.name)  # faster than getattr, and called in every forward
        if not self._is_of(weight):
            self.make()

    def renew(self) -> None:
        """Make the copy anew if the weight has changed, whether torch has counted it or not."""
        weight: Any = self.layer._parameters.get(self.name)
        if not self._is_of(weight) or self.digest != digest([weight]):
            self.make()

    def product(self, input: torch.Tensor, bias: torch.Tensor | None, index: int = 0) -> torch.Tensor:
        """Return the product with the weight, or with one expert's.  [num_tokens, inputs] -> [num_tokens, outputs]"""
        if self.autocast is not None:
            input, bias = input.to(self.autocast), None if bias is None else bias.to(self.autocast)
        if self.matrices and len(input) and self.choice.packs(len(input)):
            return self.matrices[index](input, bias)
        return F.linear(input, matrices_of(self.layer, self.weight)[index], bias)

    def _is_of(self, weight: Any) -> bool:
        if weight is None or self.weight is not weight:
            return False
        return bool(self.version == weight._version and self.address == weight.data_ptr())


def matrices_of(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return a layer's weight as matrices, one or one per expert, in a dtype.  -> [outputs, inputs] each"""
    weight = weight.detach().to(dtype or weight.dtype)
    matrices = list(weight.unbind(0)) if weight.dim() == 3 else [weight]
    # Whether weights are stored as [inputs, outputs].
    is_transposed = getattr(layer, "is_transposed", isinstance(layer, Conv1D))
    return [matrix.T for matrix in matrices] if is_transposed else matrices


def can_be_packed(weight: nn.Parameter) -> bool:
    """Return whether a weight is a dense parameter on the CPU that kernels can pack."""
    is_dense = weight.device.type == "cpu" and weight.layout is torch.strided and weight.is_contiguous()
    is_plain = type(weight) is nn.Parameter and not weight.is_inference()
    has_kernel = any(weight.dtype in dtypes for dtypes in DTYPES.values())
    return bool(is_plain and is_dense and weight.numel() > 0 and has_kernel)
