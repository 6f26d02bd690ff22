"""Packed copies of layers' weights, kept up to date with the plain weights, or instead of them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.inspection.weights_version import Digest, digest
from hf_slospec.models.linear.cpu_kernel_choice import PLAIN, choose, packed_by
from hf_slospec.models.linear.cpu_kernels import DTYPES, PACKING, Matrix

BITS = {2: torch.int16, 4: torch.int32}  # integers by bytes per element; as bits, -0.0 differs from 0.0
# Functions that need no values, and so may be called on a released weight.
OF_RELEASED = {"__get__", "__set__", "dim", "ndimension", "size", "numel", "stride", "element_size", "requires_grad_"}
OF_RELEASED |= {"__repr__", "is_floating_point", "is_complex", "is_contiguous", "is_inference", "__hash__", "__len__"}


class ReleasedWeight(nn.Parameter):
    """Parameter without values that replaces a released weight; computing with it raises UnsupportedModelError."""

    def __new__(cls, weight: torch.Tensor) -> ReleasedWeight:
        """Return a parameter with the shape and dtype of ``weight``."""
        empty = torch.empty_like(weight, device="meta", requires_grad=False)
        made: ReleasedWeight = torch.Tensor._make_subclass(cls, empty, weight.requires_grad)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # adapters are put there
        """Device of the layer."""
        return torch.device("cpu")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions that read only the metadata, and refuse all others."""
        name = getattr(func, "__name__", "")
        is_data = getattr(getattr(func, "__self__", None), "__name__", "") in ("data", "T", "mT", "H")
        if name not in OF_RELEASED or is_data:
            raise released_error(f"{name if name not in ('__get__', '__set__') else 'reading'} of a layer's weight")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise released_error("copying")

    def __deepcopy__(self, memo: Any) -> Any:
        raise released_error("copying")


def released_error(act: str) -> UnsupportedModelError:
    """Return the error for an operation that needs the plain weights."""
    return UnsupportedModelError(
        f"{act} needs the plain weights, which SLOSpecConfig(prepack='only') has released; restore them first with "
        "hf_slospec.disable(model)"
    )


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
        assert not isinstance(weight, ReleasedWeight), "the copy of a released weight is all there is of it"
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
        if isinstance(weight, ReleasedWeight):
            return
        if not self._is_of(weight) or self.digest != digest([weight]):
            self.make()

    def product(self, input: torch.Tensor, bias: torch.Tensor | None, index: int = 0) -> torch.Tensor:
        """Return the product with the weight, or with one expert's.  [num_tokens, inputs] -> [num_tokens, outputs]"""
        if self.autocast is not None:
            input, bias = input.to(self.autocast), None if bias is None else bias.to(self.autocast)
        if self.matrices and len(input) and (self.choice.packs(len(input)) or self.is_released):
            return self.matrices[index](input, bias)
        if self.is_released:  # and no tokens
            return input.new_empty(0, self.weight.shape[-1 if is_transposed(self.layer) else -2])
        return F.linear(input, matrices_of(self.layer, self.weight)[index], bias)

    @property
    def is_released(self) -> bool:
        """Return whether the plain weight was released."""
        return isinstance(self.weight, ReleasedWeight)

    def release(self) -> None:
        """Free the plain weight; the layer must already compute with the copy."""
        weight = self.weight
        if self.matrices and not self.is_released:
            with torch.inference_mode(False), torch.no_grad():
                integers = BITS[weight.element_size()]
                indices = (self._unpacked().view(integers) != weight.view(integers)).nonzero(as_tuple=True)
                self.rounded = indices, weight.detach()[indices].clone()  # rounded, or signs of zeros
                self.plain = ref(weight)
                self._set_weight(ReleasedWeight(weight))

    def restore(self) -> None:
        """Set the plain weight again, with exactly the values that it had."""
        if self.is_released:
            with torch.inference_mode(False), torch.no_grad():
                if (weight := self.plain()) is None:  # otherwise an optimiser or another model still refers to it
                    values = self._unpacked().contiguous()
                    indices, exact = self.rounded
                    values[indices] = exact
                    weight = nn.Parameter(values, self.weight.requires_grad)
                self._set_weight(weight)
                self.digest = digest([weight])

    def _unpacked(self) -> torch.Tensor:
        matrices = [matrix.unpacked().to(self.weight.dtype) for matrix in self.matrices]
        matrices = [matrix.T for matrix in matrices] if is_transposed(self.layer) else matrices
        return torch.stack(matrices) if self.weight.dim() == 3 else matrices[0].contiguous()

    def _set_weight(self, weight: nn.Parameter) -> None:
        if not isinstance(weight, ReleasedWeight):
            self.version, self.address = weight._version, weight.data_ptr()
        self.weight = weight  # after an interrupt behind this line, update() makes the copy anew
        self.layer._parameters[self.name] = weight

    def _is_of(self, weight: Any) -> bool:
        if isinstance(weight, ReleasedWeight):
            return True  # it has no values that could change
        if weight is None or self.weight is not weight:
            return False
        return bool(self.version == weight._version and self.address == weight.data_ptr())


def matrices_of(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return a layer's weight as matrices, one or one per expert, in a dtype.  -> [outputs, inputs] each"""
    weight = weight.detach().to(dtype or weight.dtype)
    matrices = list(weight.unbind(0)) if weight.dim() == 3 else [weight]
    return [matrix.T for matrix in matrices] if is_transposed(layer) else matrices


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the layer stores its weights as [inputs, outputs]."""
    return bool(getattr(layer, "is_transposed", isinstance(layer, Conv1D)))


def can_be_packed(weight: nn.Parameter) -> bool:
    """Return whether a weight is a dense parameter on the CPU that kernels can pack."""
    is_dense = weight.device.type == "cpu" and weight.layout is torch.strided and weight.is_contiguous()
    is_plain = type(weight) is nn.Parameter and not weight.is_inference()
    has_kernel = any(weight.dtype in dtypes for dtypes in DTYPES.values())
    return bool(is_plain and is_dense and weight.numel() > 0 and has_kernel)
