"""Limits on host memory that libraries do not give back: kernels that oneDNN caches, and freed
blocks that the C library keeps.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

# Maximum number of cached oneDNN kernels, half a megabyte each: enough for about 25 different
# numbers of rows of a target and a draft.
KERNELS = 256
# Environment variables that limit the kernel caches of oneDNN and of torch's layer above it. Each
# cache keeps 1,024 kernels by default, and keeps the kernels of the other one alive.
VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"

# Parameters of the C library's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Bytes. Larger blocks are returned to the operating system as soon as they are freed.
KEPT_BLOCK = 4 * 2**20 * ctypes.sizeof(ctypes.c_long)
# If one of these environment variables is set, the allocator's settings are not changed.
ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def limit_kernels() -> None:
    """Limit oneDNN to :data:`KERNELS` cached kernels, unless environment variables set other
    limits.

    Each number of rows in a batch needs different kernels, so without a limit memory would grow for
    hours. oneDNN reads the variables at its first operation in a process; a later call of this
    function has no effect.
    """
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(KERNELS))


def return_freed_memory() -> None:
    """Return memory that the calling thread has freed to the operating system. Does nothing with a
    C library other than GNU's.

    GNU's library keeps up to twice ``KEPT_BLOCK`` bytes for every thread that once needed them, and
    every start of a batcher adds a thread. ``malloc_trim`` returns all free memory except what lies
    above a thread's last block in use.
    """
    library = _gnu_library()
    if library is None:
        return
    if not any(variable in os.environ for variable in ALLOCATOR_VARIABLES):
        # Freeing a block of more than 64 KiB returns the memory above the last block in use if it
        # exceeds the trim threshold, so that is set to 0 for one such call. By default both
        # thresholds rise to the values set here as large blocks are freed.
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, 0)
        library.free(library.malloc(1 << 17))
        library.mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BLOCK)
    library.malloc_trim(0)


@functools.cache
def _gnu_library() -> ctypes.CDLL | None:
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        return None
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.restype = None
    library.free.argtypes = (ctypes.c_void_p,)
    return library
