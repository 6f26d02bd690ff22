"""Attention by ``scaled_dot_product_attention``, one call per sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_slospec.models.attention.dense import dense_attention
from hf_slospec.models.attention.packed_batch import PackedBatch


def sdpa_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row: PackedBatch,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One ``scaled_dot_product_attention`` per sequence over its own slots, in place: nothing is padded or gathered."""
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, groups = keys.shape[1], num_heads // keys.shape[1]
    out = query.new_empty(num_tokens, num_heads, values.shape[-1])
    for span, slots in zip(row.spans, row.visible, strict=True):
        own_query = query[:, span.begin : span.end]
        key, value = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)
        if softcap is None and sinks is None:
            # The query heads that share a KV head become more queries of it: faster than enable_gqa on CPU.
            mask = span.mask(window, query, groups)
            grouped = own_query.reshape(1, num_kv_heads, -1, head_dim)
            own = F.scaled_dot_product_attention(grouped, key[None], value[None], attn_mask=mask, scale=scaling)
            own = own.reshape(num_heads, -1, values.shape[-1])  # not view: on CUDA heads may stand last
        else:
            own = dense_attention(own_query, key, value, span.mask(window, query), scaling, softcap, sinks)
        out[span.begin : span.end] = own.transpose(0, 1)
    return out
