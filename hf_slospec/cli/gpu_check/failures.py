"""Errors that are recorded, so that the rest of a check goes on."""

from __future__ import annotations

import gc

import torch

from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.models.memory import is_out_of_memory


def outcome_of(error: Exception) -> dict[str, str]:
    """``out of memory``; ``refused``: a config that cannot be had here, flash without a kernel, say; or ``failed``."""
    is_refused = isinstance(error, UnsupportedOptionError)
    status = "out of memory" if is_out_of_memory(error) else "refused" if is_refused else "failed"
    return {"status": status, "reason": f"{type(error).__name__}: {error}"}


def release_memory() -> None:
    """What is no longer used, given back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
