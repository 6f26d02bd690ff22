"""What speculation takes, and running out of memory, told apart from errors of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from pydantic import BaseModel, Field

# These say nothing about the model that met them.
DEVICE_ERRORS = (MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class MemoryUse(BaseModel):
    """Bytes that speculation takes beside the models' own weights."""

    target_kv: int = Field(description="The target's pool of K/V, free slots included.")
    draft_kv: int = Field(description="The draft's.")
    staging: int = Field(description="Of both, what is kept free behind running requests for the nodes of a step.")
    prepacked: int = Field(description="Second copies of weights, see SLOSpecConfig.prepack.")


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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise MemoryError(message)
