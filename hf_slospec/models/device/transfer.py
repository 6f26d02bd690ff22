"""Copies of trees of tensors (dicts, lists, tuples, dataclasses) to a device, and signatures of such trees.

A blocking copy from the host waits for all earlier work of the device. The many small tensors that the host makes for a
forward are therefore copied together, from pinned memory, without blocking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the tree with every tensor replaced by ``function`` of it."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = (field.name for field in dataclasses.fields(tree))
        return type(tree)(**{name: map_tensors(getattr(tree, name), function) for name in fields})
    return tree


def flattened(tree: Any) -> tuple[list[torch.Tensor], Hashable]:
    """Return a tree's tensors in traversal order, and its signature.

    Signatures are equal for two trees only if these differ in nothing but the values in their tensors.
    """
    tensors, key = list[torch.Tensor](), list[Any]()
    _flatten(tree, tensors, key)
    return tensors, tuple(key)


def _flatten(tree: Any, tensors: list[torch.Tensor], key: list[Any]) -> None:
    """Append to the tensors and the signature of trees before."""
    kind = type(tree)  # is a part of the key, because 1, 1.0 and True are equal
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        key += tree.shape, tree.dtype, tree.device
        return
    parts: Iterable[Any] = ()
    if isinstance(tree, dict):
        parts = tree.values()
        key += kind, tuple(tree)
    elif isinstance(tree, (list, tuple)):
        parts = tree
        key += kind, len(tree)
    elif (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        parts = [getattr(tree, name) for name in fields]
        key.append(kind)
    else:
        key += kind, tree
    for part in parts:
        _flatten(part, tensors, key)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree in traversal order."""
    return flattened(tree)[0]


class DeviceCopy:
    """Buffers on a device for the tensors of a tree: one for all tensors on the host, one per tensor elsewhere."""

    def __init__(self, tree: Any, device: torch.device):
        self._starts, end = [], 0
        on_host = _host_tensors(tree)
        for tensor in on_host:
            self._starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._flat = torch.empty(end, dtype=torch.uint8, device=device)
        self._is_pinned = device.type == "cuda"
        views = iter(
            self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self._starts, on_host, strict=True)
        )
        self.content = map_tensors(tree, lambda tensor: next(views) if tensor.is_cpu else torch.empty_like(tensor))
        self._buffers = tensors_in(self.content)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy in the values of the tensors of a tree of the same signature, without blocking."""
        # Torch reuses pinned memory only after copies from it are done.
        flat = torch.empty(self._flat.shape, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu")
        content, starts = flat.numpy(), iter(self._starts)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if tensor.is_cpu:
                start, values = next(starts), _bytes(tensor)
                content[start : start + len(values)] = values
            else:
                buffer.copy_(tensor)
        self._flat.copy_(flat, non_blocking=True)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor's values on the host; NumPy, which has no bf16, takes a fraction of torch's time."""
    values = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return values.numpy().reshape(-1).view(np.uint8)


def _host_tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_cpu]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; on CUDA a copy, if its rows do not begin at multiples of 16 bytes, as views may not.

    Attention kernels read 16 bytes at a time. Some do not check this; an error then ends the process's CUDA context.
    """
    if tensor.is_cpu:
        return tensor
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    is_aligned = not any(start % ALIGNMENT for start in (tensor.data_ptr(), *strides))
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree on a device, copying all tensors on the host at once."""
    on_host = _host_tensors(tree)
    if device.type == "cpu" or not on_host:
        return map_tensors(tree, lambda tensor: tensor.to(device))
    copy = DeviceCopy(on_host, device)
    copy.fill(on_host)
    copied = iter(copy.content)
    return map_tensors(tree, lambda tensor: next(copied) if tensor.is_cpu else tensor.to(device))
