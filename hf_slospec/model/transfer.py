"""Copies of nested tensors (in dicts, lists, tuples, dataclasses: "trees" here) to a device, and
detection of operators that make the host wait.

A blocking copy from the host waits for all earlier work of the device. The many small tensors that
the host makes for a forward are therefore copied together, from pinned memory, without blocking.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_slospec.forks import Lock

# Bytes. Tensors in a DeviceCopy, and rows that attention kernels read, begin at multiples of it.
ALIGNMENT = 16


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of the tree with every tensor replaced by ``function(tensor)``."""
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
    """Return a tree's tensors in traversal order, and a signature.

    Two trees have equal signatures only if they differ in nothing but the values of their tensors.
    """
    tensors = list[torch.Tensor]()
    key = list[Any]()
    _flatten(tree, tensors, key)
    return tensors, tuple(key)


def _flatten(tree: Any, tensors: list[torch.Tensor], key: list[Any]) -> None:
    """Append a tree's tensors to ``tensors`` and the parts of its signature to ``key``."""
    kind = type(tree)  # part of the signature, because 1, 1.0 and True are equal
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
    """Buffers on a device that hold copies of a tree's tensors. All tensors of the tree that are on
    the host share one buffer, which is filled by a single copy; each other tensor has a separate
    buffer.
    """

    def __init__(self, tree: Any, device: torch.device):
        self._starts = []
        end = 0
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
        self.content = map_tensors(
            tree, lambda tensor: next(views) if tensor.is_cpu else torch.empty_like(tensor)
        )
        self._buffers = tensors_in(self.content)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values of another tree's tensors to the buffers, without blocking. The trees'
        signatures must be equal.
        """
        # torch reuses this pinned memory only after the copy from it has finished.
        flat = torch.empty(
            self._flat.shape, dtype=torch.uint8, pin_memory=self._is_pinned, device="cpu"
        )
        content = flat.numpy()
        starts = iter(self._starts)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if tensor.is_cpu:
                start = next(starts)
                values = _bytes(tensor)
                content[start : start + len(values)] = values
            else:
                buffer.copy_(tensor)
        self._flat.copy_(flat, non_blocking=True)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View the values of a tensor on the host as bytes. NumPy takes a fraction of torch's time, but
    has no bf16.
    """
    values = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return values.numpy().reshape(-1).view(np.uint8)


def _host_tensors(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_cpu]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor or, on CUDA, a copy if its rows do not begin at multiples of 16 bytes, as
    in some views.

    Attention kernels read 16 bytes at a time. Some do not check the alignment, and the error that
    follows ends the process's CUDA context.
    """
    if tensor.is_cpu:
        return tensor
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    is_aligned = not any(start % ALIGNMENT for start in (tensor.data_ptr(), *strides))
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return a copy of the tree on a device; all tensors on the host are copied together."""
    on_host = _host_tensors(tree)
    if device.type == "cpu" or not on_host:
        return map_tensors(tree, lambda tensor: tensor.to(device))
    copy = DeviceCopy(on_host, device)
    copy.fill(on_host)
    copied = iter(copy.content)
    return map_tensors(tree, lambda tensor: next(copied) if tensor.is_cpu else tensor.to(device))


class DeferredFlags:
    """Queue of boolean results of the device. On a CPU they are read at once; otherwise one call
    later, so that the host does not wait for the device.
    """

    def __init__(self, device: torch.device):
        # Number of further calls of next() after which a result is read.
        self.lag = 0 if device.type == "cpu" else 1
        self._on_cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def next(self, flags: torch.Tensor) -> np.ndarray | None:
        """Enqueue ``flags`` (bool, any shape), and return the flags of ``lag`` calls before; None
        in the first ``lag`` calls.
        """
        host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=self._on_cuda, device="cpu")
        host.copy_(flags, non_blocking=self._on_cuda)
        arrival = None
        if self._on_cuda:
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(flags.device))
        self._pending.append((host, arrival))
        if len(self._pending) <= self.lag:
            return None
        host, arrival = self._pending.popleft()
        if arrival is not None:
            arrival.synchronize()
        return host.numpy()


# Held while a thread captures a CUDA graph, or makes a call that would break another's capture.
_LOCK = Lock()


def apart_from_captures(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which no other thread captures a CUDA graph, synchronizes or empties the
    cache by this module's functions.
    """
    return _LOCK if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; do nothing on other devices."""
    if device.type == "cuda":
        with _LOCK:
            torch.cuda.synchronize(device)


def empty_cache() -> None:
    """Free the memory that torch caches on CUDA devices, if there are any."""
    if torch.cuda.is_available():
        with _LOCK:
            torch.cuda.empty_cache()


aten = torch.ops.aten
# Operators that copy a result to the host, or whose result has a size that depends on values.
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
# Indexing operators, which make the host wait if an index is a boolean mask.
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
BOOLEAN = (torch.bool, torch.uint8)  # dtypes of boolean masks


class HostSyncError(RuntimeError):
    """An operator made the host wait for the device."""


class SyncGuard(TorchDispatchMode):
    """Mode that raises HostSyncError if an operator in this thread makes the host wait for the
    device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args):
            raise HostSyncError(f"{func} makes the host wait for the device")
        out = func(*args, **(kwargs or {}))
        if _crosses(func, args, out):
            raise HostSyncError(f"{func} between host and device makes the host wait")
        return out


def _reads(func: Any, args: Any) -> bool:
    packet = getattr(func, "overloadpacket", None)
    if packet in INDEXED:
        return any(index is not None and index.dtype in BOOLEAN for index in args[1])
    return func is aten.repeat_interleave.Tensor or packet in READS


def _crosses(func: Any, args: Any, out: Any) -> bool:
    packet = getattr(func, "overloadpacket", None)
    if packet is aten._to_copy:
        return bool(args[0].is_cpu != out.is_cpu)
    return packet is aten.copy_ and bool(args[0].is_cpu != args[1].is_cpu) and args[1].dim() > 0
