"""Description of this machine, to which measurements on disk belong, and the directory that holds them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of what decides how long a computation takes here, the model aside."""
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": cuda or f"{device.type} {platform.processor() or platform.machine()} {cpu_name()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "half": {str(dtype): native for dtype, native in native_dtypes().items()},
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def native_dtypes() -> dict[torch.dtype, bool]:
    """Return for each half-precision dtype whether the CPU has instructions for it that oneDNN would use."""
    if not torch.backends.mkldnn.is_available():
        return {torch.bfloat16: False, torch.float16: False}
    return {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }


def digest(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kept_file(kind: str, folder: str, of: Any) -> Path:
    """Return the path of a kept measurement; its folder is created in the user's cache directory.

    Raises:
        OSError: the directory cannot be written.
    """
    return Path(cached_assets_path("hf_slospec", namespace=kind, subfolder=folder)) / f"{digest(of)}.json"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that other processes read at the same time."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def cpu_name() -> str:
    """Return the CPU's name as Linux gives it, else "unknown"."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown"
