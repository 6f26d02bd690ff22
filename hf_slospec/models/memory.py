"""What speculation takes, and running out of memory, told apart from errors of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import psutil
import torch
from pydantic import BaseModel, Field

# These say nothing about the model that met them.
DEVICE_ERRORS = (MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
GROUPS = (  # files of a control group, version 2 and 1: its limit, what it has taken, and the cache it can give back
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class FreesMemory(Protocol):
    """Keeps memory that it could do without."""

    def abort(self) -> None: ...


holders_of_idle_memory: WeakSet[FreesMemory] = WeakSet()


class MemoryUse(BaseModel):
    """Bytes that speculation takes beside the models' own weights, CUDA graphs and ``generate`` calls that run."""

    target_kv: int = Field(
        description="The target's pool of K/V, free slots included, and what a call left for the next."
    )
    draft_kv: int = Field(description="The draft's.")
    staging: int = Field(description="Of both, what is kept free behind running requests for the nodes of a step.")
    prepacked: int = Field(description="Second copies of weights, see SLOSpecConfig.prepack.")


def free_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the host's memory that are free: psutil knows the machine's, and nothing of a container's limit."""
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, cache in GROUPS:
        if all((groups / name).is_file() for name in (limit, used, stat)):
            if (most := (groups / limit).read_text().strip()) == "max":
                return free
            caches = dict(line.split() for line in (groups / stat).read_text().splitlines())
            taken = int((groups / used).read_text()) - int(caches.get(cache, 0))
            return min(free, max(int(most) - taken, 0))
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the host, where torch has no error class of its own for it."""
    messages = "can't allocate memory", "_STATUS_ALLOC_FAILED"  # of the host; of cuBLAS and cuDNN
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in messages)


@contextlib.contextmanager
def as_memory_error() -> Iterator[None]:
    """Raise MemoryError where torch found no memory; without the traceback, which would keep what the forward made."""
    message = None
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
    if message is not None:
        for keeper in list(holders_of_idle_memory):
            keeper.abort()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise MemoryError(message)
