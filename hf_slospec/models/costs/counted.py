"""Costs of forwards that are counted instead of measured: always the same for a model, on any machine of a kind."""

from __future__ import annotations

from hf_slospec.algo.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.models.packed.model import PackedModel

# Typical speeds by kind of device. Times far off change which trees are drafted, and no output in fp32.
BYTES_PER_S = {"cpu": 25e9, "cuda": 2e12}  # Bytes of weights read per second.
PRODUCTS_PER_S = {"cpu": 2e11, "cuda": 2e14}  # multiplications with additions
LAYER_S = {"cpu": 5e-5, "cuda": 2e-5}  # host's time per layer
SIZES = tuple(2**power for power in range(11))


def counted_cost(packed: PackedModel) -> ForwardCost:
    """Return the cost of a model's forwards by the bytes of its weights and of K/V, and by its products per token."""
    kind = "cuda" if packed.device.type == "cuda" else "cpu"
    weights = list(packed.model.parameters())
    read_s = sum(weight.nbytes for weight in weights) / BYTES_PER_S[kind]
    token_s = sum(weight.numel() for weight in weights if weight.ndim > 1) / PRODUCTS_PER_S[kind]
    glue_s = LAYER_S[kind] * (len(packed.layers) + len(packed.state_layers))
    curve = LatencyCurve(SIZES, tuple(glue_s + max(read_s, size * token_s) for size in SIZES))
    return ForwardCost(curve, per_request_s=0.0, per_key_s=packed.kv_bytes_per_token / BYTES_PER_S[kind])
