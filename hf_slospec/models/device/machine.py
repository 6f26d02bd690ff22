"""Description of this machine, which identifies measurements on disk, and the directory that holds them."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path

logger = logging.getLogger(__name__)

FLAGS = {  # flags of x86 CPUs; one of each group is enough
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "avx_ne_convert"},
    torch.float16: {"avx512_fp16", "amx_fp16", "avx_ne_convert"},
}


def machine(device: torch.device) -> dict[str, Any]:
    """Return what, apart from the model, decides how long a computation takes here."""
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": cuda or f"{device.type} {platform.processor() or platform.machine()} {cpu_info('model name')}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_dtypes": [str(dtype) for dtype, is_native in native_dtypes().items() if is_native],
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def native_dtypes() -> dict[torch.dtype, bool]:
    """Return for each dtype of weights whether the CPU has instructions for it that oneDNN uses.

    oneDNN accepts bf16 on every CPU with AVX-512, and emulates it where there are no instructions.
    """
    flags = set(cpu_info("flags").split())
    accepts = {torch.float32: True, torch.bfloat16: False, torch.float16: False}
    if torch.backends.mkldnn.is_available():
        accepts[torch.bfloat16] = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        accepts[torch.float16] = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return {dtype: ok and (not flags or bool(flags & FLAGS.get(dtype, flags))) for dtype, ok in accepts.items()}


@functools.cache
def log_idle_gpu() -> None:
    """Log one warning per process if there is a CUDA device; to be called where a model is on the CPU."""
    with warnings.catch_warnings(action="ignore"):  # torch warns about drivers that it cannot use
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
    """Return the path of a stored measurement; its folder is created in the user's cache directory.

    Raises:
        OSError: the directory cannot be written.
    """
    return Path(cached_assets_path("hf_slospec", namespace=kind, subfolder=folder)) / f"{digest(of)}.json"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that other processes may be reading."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@functools.cache
def cpu_info(name: str) -> str:
    """Return a property of the first CPU from Linux's /proc/cpuinfo ("model name", "flags"), or "" elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split(":")[0].strip() == name:
                return line.split(":", 1)[1].strip()
    return ""
