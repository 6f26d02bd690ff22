"""Host memory that libraries keep: kernels cached by oneDNN, and blocks that the C library does not
return.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KERNELS = 256  # half a megabyte each; enough for some 25 numbers of rows of a target and a draft
# Caches of oneDNN and of torch's layer above it; each keeps 1,024 kernels unless set, and keeps the
# other's alive.
VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"

# parameters of mallopt
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Bytes; larger blocks are returned when they are freed.
KEPT_BLOCK = 4 * 2**20 * ctypes.sizeof(ctypes.c_long)
# If one of these is set, the allocator is left as it is.
ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def limit_kernels() -> None:
    """Let oneDNN keep :data:`KERNELS` kernels, unless an environment variable sets another limit.

    Batches differ in their numbers of rows, and each number needs kernels of its own, so that
    memory would grow for hours. oneDNN reads the variables at its first operation in a process:
    after that this has no effect."""
    for variable in VARIABLES:
        os.environ.setdefault(variable, str(KERNELS))


def return_freed_memory() -> None:
    """Return memory that the calling thread has freed to the operating system, if the C library is
    GNU's.

    That library keeps up to twice ``KEPT_BLOCK`` bytes for every thread that once needed them, and
    every start of a batcher brings a new thread. ``malloc_trim`` returns everything but what lies
    above a thread's last block in use."""
    library = _gnu_library()
    if library is None:
        return
    if not any(variable in os.environ for variable in ALLOCATOR_VARIABLES):
        # Freeing a block of more than 64 KiB returns what lies above the last one, if that is
        # beyond the threshold. Both thresholds rise to these values by themselves as blocks of up
        # to that size are freed, until they are set.
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
