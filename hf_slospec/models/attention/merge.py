"""Attention over disjoint sets of keys, merged by log-sum-exp: all of it in fp32."""

from __future__ import annotations

import math

import torch


def attention_with_lse(
    query: torch.Tensor,  # [batch, num_queries, num_heads, head_dim]
    key: torch.Tensor,  # [batch, num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,  # [batch, num_keys, num_kv_heads, value_dim]
    mask: torch.Tensor,  # [batch, num_queries, num_keys] bool, True = may attend
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out.

    Returns:
        out [batch, num_queries, num_heads, value_dim] f32 and its log-sum-exp [batch, num_queries, num_heads] f32. Of a
        query that may attend to nothing they are 0 and -inf.
    """
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = key.shape[2]
    # The query heads that share a KV head become more queries of it.
    grouped = query.float().unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (
        grouped @ key.float().permute(0, 2, 3, 1) * scaling
    )  # [batch, num_kv_heads, groups * num_queries, num_keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    groups = num_heads // num_kv_heads
    scores = scores.masked_fill(~mask.repeat(1, groups, 1)[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()  # 0, not NaN, where all is masked
    out = weights @ value.float().transpose(1, 2)
    out = out.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2).flatten(2, 3)


def merge(
    outs: torch.Tensor,  # [num_parts, num_queries, num_heads, value_dim], any dtype
    lses: torch.Tensor,  # [num_parts, num_queries, num_heads] f32, -inf where a part holds no key of a query
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of all parts.  -> as one part, both f32; an out whose lse is -inf is never read"""
    largest = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    weights = (lses - largest).exp()
    total = weights.sum(0)
    # An empty part may hold anything, NaN included, and 0 * NaN is NaN.
    kept = outs.float().masked_fill(torch.isneginf(lses)[..., None], 0.0)
    out = (weights[..., None] * kept).sum(0) / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
    return out, largest + total.log()


def weigh_sinks(
    out: torch.Tensor,  # [num_queries, num_heads, value_dim]
    lse: torch.Tensor,  # [num_queries, num_heads] f32
    sinks: torch.Tensor,  # [num_heads]: logits that take probability and give no value
) -> torch.Tensor:
    """-> [num_queries, num_heads, value_dim] f32"""
    return out.float() * (lse - sinks.float()).sigmoid()[..., None]
