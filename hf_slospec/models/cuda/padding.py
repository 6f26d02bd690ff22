"""Padding of packed batches to few sizes, with tokens of sequences that belong to no request.

These padding sequences have slots of their own behind a pool's others, and each of their tokens sees itself only.
Attention and layers treat them like any other sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_slospec.models.attention.packed_batch import NewTokens
from hf_slospec.models.cuda.bucket_sizes import BUCKETS, bucket_for
from hf_slospec.models.kv_cache.pool import CachedSequence, KVPool

MAX_PADDING_SLOTS = 96  # tokens; the bucket sizes need no more for packed batches of up to 64 sequences


def padded(
    parts: Sequence[NewTokens], logit_rows: torch.Tensor, pool: KVPool
) -> tuple[list[NewTokens], torch.Tensor] | None:
    """Return the parts with padding sequences behind them, and the logit rows padded with row 0.

    None if the packed batch is larger than the largest size, or needs more padding slots than the pool has.
    """
    lengths = [len(part.input_ids) for part in parts]
    num_parts, num_tokens = bucket_for(len(parts)), sum(lengths)
    total = bucket_for(num_tokens + num_parts - len(parts))
    if num_parts == len(parts) and total > num_tokens:  # the missing tokens need a padding sequence
        num_parts = bucket_for(num_parts + 1)
        total = bucket_for(num_tokens + num_parts - len(parts))
    missing, num_padding = total - num_tokens, num_parts - len(parts)
    if total > BUCKETS[-1] or missing > pool.num_padding_slots:
        return None
    padding, start, like = [], pool.num_slots, parts[0]
    for index in range(num_padding):
        length = missing * (index + 1) // num_padding - missing * index // num_padding
        padding.append(_padding_sequence(CachedSequence(start, length), like))
        start += length
    num_rows = total if 2 * len(logit_rows) > total else bucket_for(len(logit_rows))
    return [*parts, *padding], F.pad(logit_rows, (0, num_rows - len(logit_rows)))


def _padding_sequence(sequence: CachedSequence, like: NewTokens) -> NewTokens:
    """Return a padding sequence that is on the host, or on the device, and has embeddings, where ``like`` has."""
    device = like.mask.device
    zeros = torch.zeros(sequence.capacity, dtype=torch.int64, device=device)
    embeds = None if like.embeds is None else like.embeds.new_zeros(sequence.capacity, like.embeds.shape[-1])
    return NewTokens(sequence, zeros, zeros, torch.eye(sequence.capacity, dtype=torch.bool, device=device), embeds)
