"""Attention by ``scaled_dot_product_attention``, one call per sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_slospec.forks import Lock
from hf_slospec.models.attention.dense import dense_attention
from hf_slospec.models.attention.sequence_plan import SequencePlan, plan_sequences
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.batch.packed_batch import Plans
from hf_slospec.models.device.transfer import aligned

_KERNELS_LOCK = Lock()  # torch's choice of kernels is global; the context restores it at its end


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Use other kernels than cuDNN's, which makes a plan for every new shape of a call (0.4 s)."""
    with _KERNELS_LOCK, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def sdpa_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention of each sequence over its own slots, which are sliced from the pool, not padded or gathered."""
    num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    is_plain = rules.softcap is None and rules.sinks is None and rules.bias is None
    # Query heads that share a KV head are folded into its queries, which is faster than enable_gqa on CPU.
    groups = num_heads // num_kv_heads if is_plain else 1
    plan: SequencePlan = batch.plan(plan_sequences, query.device, rules.window, rules.chunk, groups, query.dtype)
    keys, values = aligned(keys), aligned(values)
    out = query.new_empty(num_tokens, num_heads, values.shape[-1])
    with _without_cudnn() if query.is_cuda else contextlib.nullcontext():
        for sequence in plan.sequences:
            own_query = query[:, sequence.tokens]
            key, value = keys[sequence.slots].transpose(0, 1), values[sequence.slots].transpose(0, 1)
            if is_plain:
                grouped = own_query.reshape(1, num_kv_heads, -1, head_dim)
                attended = F.scaled_dot_product_attention(
                    grouped, key[None], value[None], attn_mask=sequence.mask, scale=rules.scaling
                )
                attended = attended.reshape(num_heads, -1, values.shape[-1])  # not view: on CUDA heads may be inner
            else:
                mask = sequence.mask if rules.bias is None else sequence.biased(rules.bias)
                attended = dense_attention(own_query, key, value, mask, rules)
            out[sequence.tokens] = attended.transpose(0, 1)
    return out
