"""Time of a verify step against the time to read its bytes from memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_slospec.config import SLOSpecConfig
from hf_slospec.models.compatibility.running import evaluating
from hf_slospec.models.costs.measure import Forwards, Size
from hf_slospec.models.cuda.device_calls import synchronize
from hf_slospec.models.packed import PackedModel

NUM_COPIES = NUM_FORWARDS = 10
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
GOAL = 1.15  # verify time over the floor, at batch 1


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the fastest of several large copies on the device."""
    num_bytes = COPY_BYTES[device.type]
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    destination.copy_(source)
    seconds = []
    for _ in range(NUM_COPIES):
        synchronize(device)
        begun_s = time.perf_counter()
        destination.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - begun_s)
    return 2 * num_bytes / min(seconds)


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a forward reads completely: all but an untied embedding table."""
    num_bytes: int = sum(parameter.nbytes for parameter in model.parameters())
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return num_bytes if table is output else num_bytes - int(table.nbytes)


def floor(
    target: PreTrainedModel, batch: int, keys_each: int, steps: dict[str, float] | None, bandwidth: float
) -> dict[str, Any]:
    """Compare a verify step with its floor.

    Args:
        keys_each: cached tokens of each request.
        steps: median ``tokens`` and ``verify_ms`` of hf_slospec's verify phases in the speed comparison; None if there
            were none, then one token per request is assumed.
        bandwidth: bytes per second.

    Returns:
        Among others ``floor_ms``: weights and K/V cache at this bandwidth; ``forward_ms``: a packed forward alone, by
        the backend of ``auto``; ``verify_ms``: whole verify phases, the choice of tokens included.
    """
    num_tokens = max(batch, round(steps["tokens"])) if steps else batch
    with evaluating(target):
        packed = PackedModel(target, SLOSpecConfig().attention)
        kv_bytes = batch * keys_each * packed.kv_bytes_per_token
        size = Size(num_tokens, batch, keys_each)
        forward_s = Forwards(packed)
        forward_s(size)
        seconds = statistics.median(forward_s(size) for _ in range(NUM_FORWARDS))
    weights = weight_bytes(target)
    floor_s = (weights + kv_bytes) / bandwidth
    verify_ms = steps["verify_ms"] if steps else None
    return {
        "batch": batch,
        "tokens": num_tokens,
        "keys_each": keys_each,
        "weight_gb": round(weights / 1e9, 4),
        "kv_gb": round(kv_bytes / 1e9, 4),
        "floor_ms": round(1e3 * floor_s, 4),
        "forward_ms": round(1e3 * seconds, 4),
        "forward_over_floor": round(seconds / floor_s, 3),
        "verify_ms": verify_ms,
        "verify_over_floor": None if verify_ms is None else round(verify_ms / (1e3 * floor_s), 3),
    }
