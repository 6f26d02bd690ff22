"""The threads that torch computes with on a CPU."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

SOFT = 1  # omp_pause_soft: only the threads go


def release_team() -> None:
    """Let the calling thread's OpenMP team go; the thread gets another one when it next computes.

    Every thread that computes keeps a team of its own. As soon as the teams of a process have more threads than the
    machine has cores, used or not, GNU's runtime hardly spins any more between parallel regions, and every forward
    becomes slower: on two cores 1.2 times with large layers, 1.7 times with small ones.
    """
    if (pause := _pause()) is not None:
        pause(SOFT)  # says whether it could; inside a parallel region it cannot


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """OpenMP 5's ``omp_pause_resource_all``, where torch uses GNU's runtime, whose symbols it loads for everybody."""
    runtime = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(runtime, "GOMP_parallel"):
        return None
    pause: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)
    return pause
