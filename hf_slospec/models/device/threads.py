"""OpenMP threads of torch on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))  # files of control groups, version 2 and 1
WAITING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"  # variables that say how threads wait for each other
CONTENDED = 4.0  # factor by which forwards must take longer than alone to be blamed on other processes
SOFT = 1  # omp_pause_soft: releases nothing but the threads


def release_openmp_threads() -> None:
    """Release the calling thread's OpenMP team; the thread gets a new one when it next computes.

    Every thread that computes keeps a team of its own. Once the teams of a process have more threads than the machine
    has cores, idle ones included, GNU's runtime hardly spins between parallel regions, and every forward becomes
    slower: on two cores 1.2 times with large layers, 1.7 times with small ones.
    """
    if (pause := _pause()) is not None:
        pause(SOFT)  # returns nonzero inside a parallel region, where it has no effect


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return OpenMP 5's ``omp_pause_resource_all`` if torch uses GNU's runtime, whose symbols it loads globally."""
    runtime = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(runtime, "GOMP_parallel"):
        return None
    pause: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)
    return pause


@contextlib.contextmanager
def leaving_a_core() -> Iterator[None]:
    """Compute with a thread less inside this context if torch's threads take all cores.

    A thread that shares its core with another process keeps the others of its team waiting in every operation: beside a
    compiler, a step with two threads on two cores took twenty times as long as alone.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_threads < available_cores():
        yield
        return
    torch.set_num_threads(num_threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def available_cores(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores this process may use: its affinity, which torch knows, and a container's quota."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in QUOTAS:
        if all((groups / name).is_file() for name in names):
            quota, period = " ".join((groups / name).read_text() for name in names).split()
            return num_cores if quota in ("max", "-1") else max(min(num_cores, math.ceil(int(quota) / int(period))), 1)
    return num_cores


@functools.cache
def warn_if_oversubscribed() -> None:
    """Log one warning per process if torch uses more threads than cores, which slows every operation."""
    if (num_threads := torch.get_num_threads()) > (num_cores := available_cores()):
        logger.warning(
            "torch computes with %d threads, and this process may use %d cores; torch.set_num_threads(%d) is faster",
            num_threads,
            num_cores,
            num_cores,
        )


@functools.cache
def _warn_of_contention() -> None:
    logger.warning(
        "forwards take many times as long as when they were measured; if other processes are busy on these cores, set "
        "GOMP_SPINCOUNT=1000 in the environment before Python starts, so that torch's threads do not spin while they "
        "wait for each other"
    )


def warn_if_contended(slower: float) -> None:
    """Log one warning per process if forwards take ``slower`` times as long as alone, and threads spin by default."""
    waits = torch.get_num_threads() > 1 and _pause() is not None and not any(name in os.environ for name in WAITING)
    if waits and slower > CONTENDED:
        _warn_of_contention()
