"""This machine: its description, which identifies measurements stored on disk, the directory for
them, and the numbers of cores and threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import math
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path

from hf_slospec.model.properties import input_device

logger = logging.getLogger(__name__)

# dtype -> flags of x86 CPUs, any of which means that there are instructions for the dtype.
FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "avx_ne_convert"},
    torch.float16: {"avx512_fp16", "amx_fp16", "avx_ne_convert"},
}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of hardware and software that determine how fast a model computes."""
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": cuda
        or f"{device.type} {platform.processor() or platform.machine()} {cpu_info('model name')}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_dtypes": [str(dtype) for dtype, is_native in native_dtypes().items() if is_native],
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def native_dtypes() -> dict[torch.dtype, bool]:
    """Return, for each dtype of weights, whether the CPU has instructions for it that oneDNN uses.

    oneDNN accepts bf16 on every CPU with AVX-512, and emulates it on those without bf16
    instructions.
    """
    flags = set(cpu_info("flags").split())
    accepts = {torch.float32: True, torch.bfloat16: False, torch.float16: False}
    if torch.backends.mkldnn.is_available():
        accepts[torch.bfloat16] = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        accepts[torch.float16] = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return {
        dtype: ok and (not flags or bool(flags & FLAGS.get(dtype, flags)))
        for dtype, ok in accepts.items()
    }


@functools.cache
def log_idle_gpu() -> None:
    """Log one warning per process if there is a CUDA device. To be called if a model is on
    the CPU.
    """
    with warnings.catch_warnings(action="ignore"):  # torch warns of drivers that it cannot use
        is_idle = torch.cuda.is_available()
    if is_idle:
        logger.warning(
            "the model is on the CPU, and there is a GPU (%s); move it with model.to('cuda') before it is enabled, or "
            "load it with device_map='auto'",
            torch.cuda.get_device_name(),
        )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kept_file(kind: str, folder: str, of: Any) -> Path:
    """Return the path of a stored measurement in the user's cache directory, and create its folder.

    Args:
        kind: name of the folder for this kind of measurement.
        folder: name of the subfolder.
        of: JSON value that identifies what was measured; its hash is the file's name.

    Raises:
        OSError: the directory cannot be written to.
    """
    return (
        Path(cached_assets_path("hf_slospec", namespace=kind, subfolder=folder))
        / f"{digest(of)}.json"
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file in one atomic operation, as other processes may be reading it."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@functools.cache
def cpu_info(name: str) -> str:
    """Return a property of the first CPU in Linux's /proc/cpuinfo, such as "model name" or "flags";
    "" if there is none.
    """
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split(":")[0].strip() == name:
                return line.split(":", 1)[1].strip()
    return ""


# Files of a Linux control group with its CPU quota, for version 2 and 1.
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
# Environment variables that say how OpenMP threads wait for each other.
WAITING = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
# If forwards take longer than measured by more than this factor, other processes are blamed.
CONTENDED = 4.0
SOFT = 1  # OpenMP's omp_pause_soft: releases the threads only


def release_openmp_threads() -> None:
    """Release the calling thread's OpenMP team; the thread gets a new team when it next computes.

    Every thread that computes keeps a separate team of OpenMP threads. Once the teams of a process
    have more threads than the machine has cores, idle ones included, GNU's runtime hardly spins
    between parallel regions, and every forward becomes slower: on two cores 1.2 times with large
    layers, 1.7 times with small ones.
    """
    if (pause := _pause()) is not None:
        pause(SOFT)  # returns nonzero inside a parallel region, where it has no effect


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return OpenMP 5's ``omp_pause_resource_all``; None unless torch uses GNU's runtime, whose
    symbols are visible in the process.
    """
    runtime = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(runtime, "GOMP_parallel"):
        return None
    pause: Callable[[int], int] | None = getattr(runtime, "omp_pause_resource_all", None)
    return pause


@contextlib.contextmanager
def leaving_a_core() -> Iterator[None]:
    """Context manager in which torch uses one thread fewer, if its threads occupy all cores.

    A thread that shares its core with another process makes the other threads of its team wait in
    every operation: next to a compiler, a step with two threads on two cores took twenty times as
    long as alone.
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
    """Return the number of cores that this process may use, limited by its CPU affinity and a
    container's quota.

    Args:
        groups: folder of the control groups.
    """
    num_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for names in QUOTAS:
        if all((groups / name).is_file() for name in names):
            quota, period = " ".join((groups / name).read_text() for name in names).split()
            return (
                num_cores
                if quota in ("max", "-1")
                else max(min(num_cores, math.ceil(int(quota) / int(period))), 1)
            )
    return num_cores


@functools.cache
def warn_if_oversubscribed() -> None:
    """Log one warning per process if torch uses more threads than there are cores, which slows
    every operation.
    """
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
    """Log one warning per process if other processes seem to slow forwards down because OpenMP
    threads spin.

    Args:
        slower: factor by which forwards take longer than when they were measured.
    """
    waits = (
        torch.get_num_threads() > 1
        and _pause() is not None
        and not any(name in os.environ for name in WAITING)
    )
    if waits and slower > CONTENDED:
        _warn_of_contention()


def device_name(device: torch.device) -> str:
    """Return a device as text, with its model name if that is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if device.type == "cpu":
        name = cpu_info("model name")
    return f"{device} ({name})" if name else str(device)


def size_and_place(model: Any) -> str:
    """Return the size, dtype and device of a model as text."""
    dtype = str(model.dtype).removeprefix("torch.")
    size = f"{model.num_parameters() / 1e6:.0f} M parameters"
    # Models that are refused may have several embedding tables.
    is_one = hasattr(model.get_input_embeddings(), "weight")
    device = input_device(model) if is_one else model.device
    return f"{size}, {dtype}, on {device_name(device)}"


def weight_formats(model: Any) -> str:
    """Return how many matrices of weights a model has in each dtype or quantised format, as
    text.
    """
    weights = {weight: weight for weight in model.parameters() if weight.ndim > 1}
    formats = Counter(map(_format_of, weights))
    # Libraries that keep integers in buffers: GPTQ, AWQ.
    formats += Counter(
        type(each).__name__ for each in model.modules() if "qweight" in each._buffers
    )
    return ", ".join(f"{number} of {name}" for name, number in formats.items())


def _format_of(weight: Any) -> str:
    if type(weight) in (torch.Tensor, torch.nn.Parameter):
        return str(weight.dtype).removeprefix("torch.")
    name: str = getattr(weight, "format", type(weight).__name__)
    return name
