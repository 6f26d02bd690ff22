"""Detection of operators that make the host wait for the device; also works on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operators whose results, or the sizes of them, are needed on the host.
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
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index)
BOOLEAN = (torch.bool, torch.uint8)  # an index of these dtypes has a result of unknown size


class HostSyncError(RuntimeError):
    """An operator made the host wait for the device."""


class SyncGuard(TorchDispatchMode):
    """Context in which an operator of this thread that makes the host wait raises HostSyncError."""

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
