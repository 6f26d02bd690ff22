"""Reference attention in plain torch operations: the ``4d_mask`` backend, and the fallback of ``sdpa``."""

from __future__ import annotations

import torch

from hf_slospec.models.attention.sequence_plan import SequencePlan, plan_sequences
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.batch.packed_batch import Plans


def dense_attention(
    query: torch.Tensor,  # [num_heads, num_queries, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,  # [num_kv_heads, num_keys, value_dim]
    mask: torch.Tensor | None,  # [num_queries, num_keys] additive
    rules: AttentionRules,  # window and chunk are part of the mask
) -> torch.Tensor:
    """Return attention computed step by step, softmax in fp32.  -> [num_heads, num_queries, value_dim]"""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = rules.capped(query @ key.transpose(1, 2) * rules.scaling)
    if mask is not None:
        scores = scores + mask
    if (sinks := rules.sinks) is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[1]] @ value


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention of the whole batch over the whole pool under one mask: the reference of all other backends."""
    mask = torch.full((query.shape[1], keys.shape[0]), float("-inf"), dtype=query.dtype, device=query.device)
    plan: SequencePlan = batch.plan(plan_sequences, query.device, rules.window, rules.chunk, 1, query.dtype)
    for sequence in plan.sequences:
        mask[sequence.tokens, sequence.slots] = 0.0 if sequence.mask is None else sequence.mask
    is_seen = mask.isfinite().any(0)  # other slots may hold NaN, which masks do not keep out
    key, value = keys[is_seen].transpose(0, 1), values[is_seen].transpose(0, 1)
    return dense_attention(query, key, value, mask[:, is_seen], rules).transpose(0, 1)


def isolated_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention of one token after the other, each over exactly the keys that it sees.

    A mask does not keep out NaN: it adds to scores, and 0 times NaN is NaN.
    """
    out = query.new_empty(query.shape[1], query.shape[0], values.shape[-1])
    plan: SequencePlan = batch.plan(plan_sequences, query.device, rules.window, rules.chunk, 1, query.dtype)
    for sequence in plan.sequences:
        key, value = keys[sequence.slots].transpose(0, 1), values[sequence.slots].transpose(0, 1)
        bias = None if rules.bias is None else sequence.biased(rules.bias)
        for row, seen in enumerate(sequence.seen(rules.window, rules.chunk)):
            token = slice(sequence.tokens.start + row, sequence.tokens.start + row + 1)
            row_bias = None if bias is None else bias[:, row : row + 1, seen]
            attended = dense_attention(query[:, token], key[:, seen], value[:, seen], row_bias, rules)
            out[token] = attended.transpose(0, 1)
    return out
