"""Memory that speculation uses, free memory of the host, and recognition of out-of-memory
errors.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import numpy as np
import psutil
import torch
from pydantic import BaseModel, Field

from hf_slospec.model.transfer import empty_cache

# Errors that a forward may raise because of the device or host, not because of the model.
DEVICE_ERRORS = (
    MemoryError,
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
# Files of a Linux control group, for version 2 and 1: memory limit, memory usage, statistics, and
# the entry of the statistics with the page cache that can be reclaimed.
GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


# Objects that keep unused memory to save time, and free it in ``free_idle_memory()``.
holders_of_idle_memory: WeakSet[Any] = WeakSet()


class MemoryUse(BaseModel):
    """Bytes that speculation uses in addition to the models' own weights and CUDA graphs."""

    target_kv: int = Field(
        description="K/V cache of the target: of all its requests, free slots included."
    )
    draft_kv: int = Field(description="K/V cache of the draft.")
    states: int = Field(
        description="Recurrent states of running requests, in models with layers that keep some."
    )
    features: int = Field(
        description="Hidden states of the target that a trained drafter has not processed yet."
    )
    staging: int = Field(
        description="Part of both caches that is kept free for the nodes of a step."
    )
    prepacked: int = Field(description="Packed copies of weights, see SLOSpecConfig.prepack.")
    rounded_weights: int = Field(
        description="Number of weights that their copies hold rounded: too small for fp16."
    )


def free_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free memory of the host in bytes. A container's limit is respected, which psutil
    does not read.

    Args:
        groups: folder of the control groups.
    """
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, cache in GROUPS:
        if all((groups / name).is_file() for name in (limit, used, stat)):
            if (max_bytes := (groups / limit).read_text().strip()) == "max":
                return free
            caches = dict(line.split() for line in (groups / stat).read_text().splitlines())
            taken = int((groups / used).read_text()) - int(caches.get(cache, 0))
            return min(free, max(int(max_bytes) - taken, 0))
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory. For the host,
    torch raises a plain RuntimeError, which is recognised by its message.
    """
    # Messages of torch's host allocator, and of cuBLAS and cuDNN.
    messages = ("can't allocate memory", "_STATUS_ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        text in str(error) for text in messages
    )


@contextlib.contextmanager
def as_memory_error() -> Iterator[None]:
    """Context manager that turns torch's out-of-memory errors into MemoryError, and frees idle
    memory.

    The traceback of the original error is dropped, as it refers to the forward's tensors.
    """
    message = None
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
    if message is not None:
        for holder in list(holders_of_idle_memory):
            holder.free_idle_memory()
        empty_cache()
        raise MemoryError(message)


ALIGNMENT = 64  # bytes; torch aligns its own tensors on CPUs to as many


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, the operating system zeroes their memory when it is first written.

    ``torch.zeros`` writes all of it at once, so a step that enlarges the K/V pool would take tenths
    of a second longer.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    offset = -raw.data_ptr() % ALIGNMENT
    return raw[offset : offset + num_bytes].view(dtype).view(*shape)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager that delays KeyboardInterrupt to its end: an interrupted move of K/V would
    corrupt other callers' sequences.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            previous(*received[0])
