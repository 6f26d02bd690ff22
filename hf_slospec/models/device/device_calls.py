"""Calls that affect a whole CUDA device; made during a capture in another thread, they would break it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from hf_slospec.forks import Lock

_LOCK = Lock()  # one per process; held while a thread captures or makes such a call


def apart_from_captures(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which no other thread captures a forward or makes calls of this module."""
    return _LOCK if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; do nothing on other devices."""
    if device.type == "cuda":
        with _LOCK:
            torch.cuda.synchronize(device)


def empty_cache() -> None:
    """Return unused memory to the CUDA devices, if there are any."""
    if torch.cuda.is_available():
        with _LOCK:
            torch.cuda.empty_cache()
