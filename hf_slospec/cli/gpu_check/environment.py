"""The GPU and the software on it."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import torch

from hf_slospec.models.attention.kernel_choice import kernel_on
from hf_slospec.models.attention.kernels import HALF, FlashKernel

HEAD_DIM = 64  # of the embedded target, inflated or not
ASKED = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu,memory.total,utilization.gpu"
)


def why_no_device(device: str) -> str | None:
    """Why the check cannot run on it and the way out; None if it can."""
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        why = (
            f"torch {torch.__version__} was built without CUDA; install a CUDA build (https://pytorch.org/get-started)"
        )
    else:
        count = torch.cuda.device_count()
        why = (
            f"torch {torch.__version__}, built for {torch.version.cuda or torch.version.hip}, sees {count} devices; "
            "see whether `nvidia-smi` lists one, whether the driver is as new as that build wants, and "
            "what CUDA_VISIBLE_DEVICES says"
        )
    return f"no CUDA device: torch.cuda.is_available() is False. {why}. `hf_slospec bench` runs on a CPU."


def environment(device: torch.device) -> dict[str, Any]:
    """What decides how fast it is, as far as it can be read."""
    facts: dict[str, Any] = {
        "device": str(device),
        "flash_attn": _version("flash-attn"),
        "kernels": {str(dtype).removeprefix("torch."): _kernel(device, dtype) for dtype in HALF},
    }
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return facts | {
        "gpu": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(total / 2**30, 2),
        "free_memory_gib": round(free / 2**30, 2),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "nvidia_smi": nvidia_smi(getattr(properties, "uuid", None)),
    }


def nvidia_smi(uuid: Any) -> dict[str, str] | None:
    """Driver, clocks and load at this moment; None where it cannot be had."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = found.stdout.strip().splitlines()
    return dict(zip(ASKED.split(","), (each.strip() for each in lines[0].split(",")), strict=False)) if lines else None


def _kernel(device: torch.device, dtype: torch.dtype) -> str:
    kernel: FlashKernel | str = kernel_on(device, dtype, HEAD_DIM)
    return f"none: {kernel}" if isinstance(kernel, str) else kernel.name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
