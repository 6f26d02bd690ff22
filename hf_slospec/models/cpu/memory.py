"""Memory that torch and the C library keep on a CPU: kernels of oneDNN, and freed memory."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable

KERNELS = 256  # half a megabyte each; enough for some 25 numbers of rows of a target and a draft
# Of oneDNN itself, and of the layer between it and torch; both keep 1,024 unless set, and hold on to each other's.
VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def limit_kernels() -> None:
    """Let oneDNN keep :data:`KERNELS` kernels, unless an environment variable says how many.

    Batches differ in their numbers of rows, and each number needs kernels of its own, so that memory would grow for
    hours. oneDNN reads the variables at its first operation in a process: after that this has no effect.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(KERNELS))


def return_freed_memory() -> None:
    """Return memory that was freed to the operating system, where the C library is GNU's.

    It keeps freed memory for the thread that asked for it, and every start of a batcher brings a new thread.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    trim: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
    return trim
