"""The device that a command uses where none is named."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError, SLOSpecError
from hf_slospec.models.device.machine import cpu_info
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.options import AUTO
from hf_slospec.tiny.embedded import load_tiny_pair, tiny_prompts

logger = logging.getLogger(__name__)

TRIAL: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8}


def chosen_device(name: str) -> torch.device:
    """Return the device that ``--device`` names; auto: CUDA, or MPS if a trial is right, else the CPU.

    Raises:
        InvalidInputError: torch has no such device here.
    """
    if name == AUTO:
        return _best_device()
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch without CUDA, or without that device's module
        raise InvalidInputError(f"--device {name}: {error}; choose another device, or auto") from error
    if torch.device(name).type == "meta":
        raise InvalidInputError("--device meta: its tensors have no data; choose another device")
    return torch.device(name)


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        device = torch.device("mps")
        if decodes_as_stock(device):
            return device
        logger.warning("the GPU (mps) is not used: a trial on it failed, or gave other tokens than generate")
    return torch.device("cpu")


def decodes_as_stock(device: torch.device) -> bool:
    """Return whether the embedded pair gives the same tokens on a device with speculation as with ``generate``."""
    target, draft, tokenizer = load_tiny_pair()
    config = SLOSpecConfig(policy="fixed", max_depth=2, max_width=2)
    try:
        model = target.to(device)  # type: ignore[arg-type]  # decorated method
        generator = SLOSpecGenerator(model, draft.to(device), config=config)  # type: ignore[arg-type]
        inputs = tokenizer(tiny_prompts()[0], return_tensors="pt").to(device)
        for do_sample in (False, True):
            outputs = []
            for generate in (model.generate, generator.generate):
                torch.manual_seed(0)
                outputs.append(generate(inputs["input_ids"], do_sample=do_sample, **TRIAL))
            if not torch.equal(*outputs):
                return False
    except (SLOSpecError, RuntimeError, TypeError) as error:  # operations or dtypes that the device lacks
        logger.info("a trial on %s failed: %s", device, error)
        return False
    return True


def device_name(device: torch.device) -> str:
    """Return a device as text, with its model name if that is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if device.type == "cpu":
        name = cpu_info("model name")
    return f"{device} ({name})" if name else str(device)
