"""Numerical check of a flash-attention kernel before its first use."""

from __future__ import annotations

import math

import torch

from hf_slospec.models.attention.flash_kernels import FlashKernel, KernelUnavailable
from hf_slospec.models.attention.packing import Entries
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.device.transfer import to_device


def check_kernel(kernel: FlashKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise KernelUnavailable unless the kernel matches reference attention on calls laid out as packed batches are.

    Versions of a kernel differ in the log-sum-exp they return and in the alignment of the causal mask.
    """
    scaling, softcaps = head_dim**-0.5, (None, 5.0) if kernel.has_softcap else (None,)
    cases = [
        (is_causal, AttentionRules(scaling, window, softcap))
        for is_causal, window in ((False, None), (True, None), (True, 3))
        for softcap in softcaps
    ]
    try:
        errors = [_error(kernel, device, dtype, head_dim, *case) for case in cases]
    except Exception as error:  # compilers of kernels raise classes of their own
        raise KernelUnavailable(f"{kernel.name} failed in a trial with {error!r}") from error
    if not max(errors) <= TRIAL_TOLERANCE:  # also refuses NaN
        raise KernelUnavailable(f"{kernel.name} was off by {max(errors):.2g} in a trial")


TRIAL_TOLERANCE = 0.05  # absolute: values and log-sum-exps are of order one, and the kernels round to 8 bits
# Tokens and the slots they see; the slots before and between these ranges are unused.
TRIAL_RANGES = [(range(0, 3), slice(2, 9)), (range(3, 5), slice(9, 9)), (range(5, 6), slice(12, 20))]
TRIAL_CHAINS = [(range(0, 3), slice(2, 9)), (range(3, 8), slice(12, 17))]


def _error(
    kernel: FlashKernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_causal: bool,
    rules: AttentionRules,
) -> float:
    ranges = TRIAL_CHAINS if is_causal else TRIAL_RANGES
    num_heads = 4 if is_causal else 2  # query heads are folded where the mask does not depend on the query
    entries = to_device(Entries.of(ranges), device)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, heads, head_dim, generator=draw, device="cpu").to(device, dtype)
        for length, heads in ((len(entries.token_indices), num_heads), (24, 2), (24, 2))
    )
    window = rules.window
    out, lse = kernel(query, key, value, entries, is_causal, rules)
    if lse.shape != (num_heads, len(query)) or lse.dtype != torch.float32:
        raise KernelUnavailable(f"{kernel.name} returns a log-sum-exp of shape {list(lse.shape)}, {lse.dtype}")
    worst = 0.0
    for tokens, slots in ranges:
        if slots.start < slots.stop:
            queries = slice(tokens.start, tokens.stop)
            mask = torch.ones(len(tokens), slots.stop - slots.start, dtype=torch.bool, device=device)
            if is_causal:
                mask = mask.tril(mask.shape[1] - len(tokens))
                mask = mask if window is None else mask.triu(mask.shape[1] - len(tokens) - window + 1)
            expected, expected_lse = attention_with_lse(
                query[queries][None], key[slots][None], value[slots][None], mask[None], rules
            )
            errors = (out[queries].float() - expected[0]).flatten(), (lse[:, queries].T - expected_lse[0]).flatten()
            worst = max(worst, float(torch.cat(errors).abs().nan_to_num(nan=torch.inf).max()))
    return worst


def attention_with_lse(
    query: torch.Tensor,  # [batch, num_queries, num_heads, head_dim]
    key: torch.Tensor,  # [batch, num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,  # [batch, num_keys, num_kv_heads, value_dim]
    mask: torch.Tensor,  # [batch, num_queries, num_keys] bool, True = may attend
    rules: AttentionRules,  # the window is part of the mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return reference attention in fp32 and its log-sum-exp.

    Returns:
        out [batch, num_queries, num_heads, value_dim] f32 and lse [batch, num_queries, num_heads] f32; 0 and -inf for a
        query that may attend to no key.
    """
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = key.shape[2]
    # Query heads that share a KV head are folded into its queries.
    grouped = query.float().unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # [batch, num_kv_heads, groups * num_queries, num_keys]
    scores = rules.capped(grouped @ key.float().permute(0, 2, 3, 1) * rules.scaling)
    groups = num_heads // num_kv_heads
    scores = scores.masked_fill(~mask.repeat(1, groups, 1)[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()  # 0, not NaN, where all is masked
    out = weights @ value.float().transpose(1, 2)
    out = out.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse.unflatten(2, (groups, num_queries)).permute(0, 3, 1, 2).flatten(2, 3)
