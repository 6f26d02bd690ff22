"""Time of a verify step against the time to read its bytes from memory."""

from __future__ import annotations

import statistics
from typing import Any

from transformers import PreTrainedModel

from benchmarks.gpu.quantised import num_bytes
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating

NUM_FORWARDS = 10
GOAL = 1.15  # verify time over the floor, at batch 1


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that a forward reads completely: all but an untied embedding
    table.
    """
    total: int = sum(map(num_bytes, model.parameters()))
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    return total if table is output else total - num_bytes(table)


def floor(
    target: PreTrainedModel,
    batch: int,
    keys_each: int,
    steps: dict[str, float] | None,
    bandwidth: float,
    datasheet: float | None,
) -> dict[str, Any]:
    """Compare a verify step with its floor.

    Args:
        keys_each: cached tokens of each request.
        steps: median ``tokens`` and ``verify_ms`` of hf_slospec's verify phases in the speed
            comparison; None if there were none, then one token per request is assumed.
        bandwidth: bytes per second, as measured by reading.
        datasheet: bytes per second as the vendor states them; None if unknown.

    Returns:
        Among others ``floor_ms``: weights and K/V cache at this bandwidth; ``forward_ms``: a packed
            forward alone, by
        the backend of ``auto``; ``verify_ms``: whole verify phases, the choice of tokens included.
    """
    num_tokens = max(batch, round(steps["tokens"])) if steps else batch
    with evaluating(target):
        packed = PackedModel(target)
        kv_bytes = batch * keys_each * packed.kv_bytes_per_token
        size = Size(num_tokens, batch, keys_each)
        forward_s = Forwards(packed)
        forward_s(size)
        seconds = statistics.median(forward_s(size) for _ in range(NUM_FORWARDS))
    weights = weight_bytes(target)
    floor_ms = 1e3 * (weights + kv_bytes) / bandwidth
    datasheet_ms = None if datasheet is None else 1e3 * (weights + kv_bytes) / datasheet
    forward_ms = 1e3 * seconds
    verify_ms = steps["verify_ms"] if steps else None
    return {
        "batch": batch,
        "tokens": num_tokens,
        "keys_each": keys_each,
        "weight_gb": round(weights / 1e9, 4),
        "kv_gb": round(kv_bytes / 1e9, 4),
        "floor_ms": round(floor_ms, 4),
        "datasheet_floor_ms": _ratio(datasheet_ms, 1.0),
        "forward_ms": round(forward_ms, 4),
        "forward_over_floor": _ratio(forward_ms, floor_ms),
        "forward_over_datasheet": _ratio(forward_ms, datasheet_ms),
        "verify_ms": verify_ms,
        "verify_over_floor": _ratio(verify_ms, floor_ms),
        "verify_over_datasheet": _ratio(verify_ms, datasheet_ms),
    }


def _ratio(value: float | None, unit: float | None) -> float | None:
    return None if value is None or unit is None else round(value / unit, 4)
