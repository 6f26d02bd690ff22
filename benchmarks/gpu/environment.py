"""The GPU and its software."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import torch

from hf_slospec.cuda.flash_attention import kernel_on
from hf_slospec.cuda.flash_kernels import HALF, FlashKernel

HEAD_DIM = 128  # as in Llama-3.1-8B
NVIDIA_SMI_FIELDS = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu,memory.total,utilization.gpu"
)


def why_no_device(device: str) -> str | None:
    """Return why the check cannot run on this device and what to do; None if it can."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        return f"--device {device}: {error}"
    if kind != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} was built without CUDA; install a CUDA build (https://pytorch.org/get-started)"
    else:
        count = torch.cuda.device_count()
        reason = (
            f"torch {torch.__version__}, built for {torch.version.cuda or torch.version.hip}, finds {count} devices; "
            "check that `nvidia-smi` lists a device, that the driver is recent enough for this build, and the value of "
            "CUDA_VISIBLE_DEVICES"
        )
    return f"no CUDA device: torch.cuda.is_available() is False. {reason}. `hf_slospec bench` runs on a CPU."


def environment(device: torch.device) -> dict[str, Any]:
    """Return the properties of the device and its software that affect speed."""
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
    """Return the current driver, clocks and load by ``nvidia-smi``; None if it fails."""
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,noheader"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = found.stdout.strip().splitlines()
    if not lines:
        return None
    return dict(
        zip(NVIDIA_SMI_FIELDS.split(","), map(str.strip, lines[0].split(",")), strict=False)
    )


def _kernel(device: torch.device, dtype: torch.dtype) -> str:
    kernel: FlashKernel | str = kernel_on(device, dtype, HEAD_DIM)
    return f"none: {kernel}" if isinstance(kernel, str) else kernel.name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
