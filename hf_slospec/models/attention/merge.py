"""Attention over disjoint sets of keys, merged by log-sum-exp: all of it in fp32."""

from __future__ import annotations

import torch


def merged_attention(
    query: torch.Tensor,  # [batch, num_queries, head_dim]
    key: torch.Tensor,  # [batch, num_keys, head_dim]
    value: torch.Tensor,  # [batch, num_keys, value_dim]
    bias: torch.Tensor,  # [batch, num_queries, num_keys] f32: 0, or -inf where a query may not attend
    outs: torch.Tensor,  # [batch, num_queries, num_parts, value_dim]: attention to other keys
    lses: torch.Tensor,  # [batch, num_queries, num_parts] f32: its log-sum-exp, -inf where there are no other keys
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention to these keys and to those of the other parts, all in one softmax.

    A part stands in it like a single key, whose score is the part's log-sum-exp and whose value is its out; a sink is a
    part whose out is 0. Every query attends to something.

    Returns:
        [batch, num_queries, value_dim] f32.
    """
    query, key_t = query.float(), key.float().transpose(1, 2)
    if softcap is None:
        scores = torch.baddbmm(bias, query, key_t, alpha=scaling)
    else:
        scores = softcap * torch.tanh(query @ key_t * (scaling / softcap)) + bias
    weights = torch.cat((scores, lses), -1).softmax(-1)
    num_keys = key.shape[1]
    parts = (weights[..., num_keys:, None] * outs).sum(-2)
    return torch.baddbmm(parts, weights[..., :num_keys], value.float())


def weigh_sinks(
    out: torch.Tensor,  # [num_queries, num_heads, value_dim]
    lse: torch.Tensor,  # [num_queries, num_heads] f32
    sinks: torch.Tensor,  # [num_heads]: logits that take probability and give no value
) -> torch.Tensor:
    """-> [num_queries, num_heads, value_dim] f32"""
    return out.float() * (lse - sinks.float()).sigmoid()[..., None]
