"""Padding of packed batches to few sizes, with tokens of sequences that belong to no request.

Padding sequences use slots at the end of the pool, and each of their tokens attends to itself only.
Attention and layers treat them like any other sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.batch.packed_batch import NewTokens
from hf_slospec.models.device.bucket_sizes import BATCHES, BUCKETS, bucket_for
from hf_slospec.models.kv_cache.pool import KVPool

MAX_PADDING_SLOTS = 144  # tokens: the largest step between two sizes, and one for each of 16 padding sequences
MAX_KEPT = 256  # padding sequences that are kept for later batches
SHORT = 16  # tokens; shorter padding sequences do not make attention faster


def padded(
    parts: Sequence[NewTokens], logit_rows: torch.Tensor, pool: KVPool
) -> tuple[list[NewTokens], torch.Tensor] | None:
    """Return the parts with padding sequences behind them, and the logit rows padded with row 0.

    Returns None if the batch exceeds the largest size, or needs more padding slots than the pool has.
    """
    lengths = [part.num_tokens for part in parts]
    num_padding, missing = _missing(len(parts), sum(lengths), max(lengths))
    total = sum(lengths) + missing
    if total > BUCKETS[-1] or missing > pool.num_padding_slots:
        return None
    padding, start, like = [], pool.num_slots, parts[0]
    for index in range(num_padding):
        length = missing * (index + 1) // num_padding - missing * index // num_padding
        padding.append(_padding_sequence(start, length, like))
        start += length
    num_rows = total if 2 * len(logit_rows) > total else bucket_for(len(logit_rows))
    if num_rows > len(logit_rows):
        logit_rows = F.pad(logit_rows, (0, num_rows - len(logit_rows)))
    return [*parts, *padding], logit_rows


def _missing(num_parts: int, num_tokens: int, longest: int) -> tuple[int, int]:
    """Return the numbers of padding sequences and of their tokens."""
    num_padding = bucket_for(num_parts, BATCHES) - num_parts
    missing = bucket_for(num_tokens + num_padding) - num_tokens
    # Attention pads all sequences to the longest one, so that should not be a padding sequence.
    needed = -(-missing // max(bucket_for(longest), SHORT))
    if needed == 1 > num_padding:
        num_padding = 1  # one more sequence than BATCHES asks for, not a whole bucket more
    elif needed > num_padding:
        num_padding = bucket_for(num_parts + needed, BATCHES) - num_parts
    return num_padding, bucket_for(num_tokens + num_padding) - num_tokens


def _padding_sequence(start: int, length: int, like: NewTokens) -> NewTokens:
    """Return a padding sequence on the device of ``like``, with embeddings if that has some."""
    made = _kept_padding(start, length, like.mask.dtype, like.mask.device)
    if like.embeds is None:
        return made
    return replace(made, embeds=like.embeds.new_zeros(length, like.embeds.shape[-1]))


@functools.lru_cache(maxsize=MAX_KEPT)
def _kept_padding(start: int, length: int, dtype: torch.dtype, device: torch.device) -> NewTokens:
    """Return a padding sequence, which is only to be read."""
    zeros = torch.zeros(length, dtype=torch.int64, device=device)
    return NewTokens(CachedSequence(start, length), zeros, zeros, torch.eye(length, dtype=dtype, device=device))
