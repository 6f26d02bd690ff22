"""Merging of attention over disjoint sets of keys by log-sum-exp, in fp32."""

from __future__ import annotations

import torch

from hf_slospec.models.batch.attention_rules import AttentionRules


def merged_attention(
    query: torch.Tensor,  # [batch, num_queries, head_dim]
    key: torch.Tensor,  # [batch, num_keys, head_dim]
    value: torch.Tensor,  # [batch, num_keys, value_dim]
    bias: torch.Tensor,  # [batch, num_queries, num_keys] f32: 0, or -inf where a query may not attend
    outs: torch.Tensor,  # [batch, num_queries, num_parts, value_dim]: attention over other keys
    lses: torch.Tensor,  # [batch, num_queries, num_parts] f32: log-sum-exps of outs, -inf where a part has no keys
    rules: AttentionRules,  # sinks are among the parts
) -> torch.Tensor:
    """Return attention over these keys and those of the parts, in one softmax.

    A part enters the softmax as one key, with the part's log-sum-exp as score and its out as value; a sink is a part
    with an out of 0. Every query must attend to at least one key.

    Returns:
        [batch, num_queries, value_dim] f32.
    """
    query, key_t = query.float(), key.float().transpose(1, 2)
    if rules.softcap is None:
        scores = torch.baddbmm(bias, query, key_t, alpha=rules.scaling)
    else:
        scores = rules.capped(query @ key_t * rules.scaling) + bias
    weights = torch.cat((scores, lses), -1).softmax(-1)
    num_keys = key.shape[1]
    parts = (weights[..., num_keys:, None] * outs).sum(-2)
    return torch.baddbmm(parts, weights[..., :num_keys], value.float())


def weigh_sinks(
    out: torch.Tensor,  # [num_queries, num_heads, value_dim]
    lse: torch.Tensor,  # [num_queries, num_heads] f32
    sinks: torch.Tensor,  # [num_heads]: logits that take probability but contribute no value
) -> torch.Tensor:
    """Return ``out`` scaled for sinks in the softmax.  -> [num_queries, num_heads, value_dim] f32"""
    return out.float() * (lse - sinks.float()).sigmoid()[..., None]
