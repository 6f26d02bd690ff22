"""``QuantisedWeight``, the tensor class of parameters that stay packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from hf_slospec.cpu.quantised import DTYPES, NAMES, PackedMatrix
from hf_slospec.errors import UnsupportedOptionError

aten = torch.ops.aten
_DATA: Any = torch.Tensor.data


class QuantisedWeight(torch.Tensor):
    """A weight [outputs, inputs] in the dtype of its model, held by a :class:`PackedMatrix`.

    Linear layers and embeddings of torch compute with the packed matrix; other operators get the
    dequantised weight.
    """

    matrix: PackedMatrix = None  # type: ignore[assignment]  # set by __new__

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, dtype: torch.dtype) -> QuantisedWeight:
        made = torch.Tensor._make_wrapper_subclass(
            cls, (matrix.outputs, matrix.inputs), dtype=dtype, device=torch.device("cpu")
        )
        made.matrix = matrix
        vars(made).update(matrix.tensors)
        return made

    @property
    def format(self) -> str:
        """Number of bits, as text."""
        return f"{NAMES[self.matrix.bits]}, packed"

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantisedWeight({self.format}, {list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors that hold the values, as torch's subclasses do."""
        return list(self.matrix.tensors), (self.matrix, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: Mapping[str, torch.Tensor], context: Any, *_: Any
    ) -> QuantisedWeight:
        return cls(*context)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = QuantisedWeight(self.matrix, self.dtype)  # codes are never written
        memo[id(self)] = made = nn.Parameter(copied, False)
        return made if isinstance(self, nn.Parameter) else copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and type(args[0]) is not cls:
            input, weight, bias = (*args, kwargs.get("bias"))[:3]
            is_packable = input.device.type == "cpu" and input.dtype in DTYPES
            if type(weight) is cls and is_packable:
                return weight.matrix(input, bias)
        if func is F.embedding and type(args[1]) is cls:
            return args[1].matrix.rows(args[0]).to(args[1].dtype)
        if func == _DATA.__get__:
            return args[0].detach()  # torch's own would be without a matrix
        if func in (_DATA.__set__, torch.Tensor.__setitem__) and type(args[0]) is cls:
            raise _written(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].matrix, args[0].dtype)
        device = kwargs.get("device")
        if func is aten._to_copy.default and (device is None or torch.device(device).type == "cpu"):
            return cls(args[0].matrix, kwargs.get("dtype") or args[0].dtype)

        for argument, value in zip(func._schema.arguments, args, strict=False):
            if type(value) is cls and argument.alias_info and argument.alias_info.is_write:
                raise _written(str(func.overloadpacket))

        def plain(value: Any) -> Any:
            return value.matrix.dequantised().to(value.dtype) if type(value) is cls else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _written(operation: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{operation} cannot write to a weight that stays packed; set a dense one in its place, "
        "layer.weight = torch.nn.Parameter(values), or load the model again with "
        "SLOSpecConfig(weights='keep')"
    )
