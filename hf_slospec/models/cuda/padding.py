"""Packed rows come in few sizes: what is missing is filled up with tokens of sequences that belong to nobody.

These ghosts have slots of their own behind a pool's others, and each of their tokens sees itself only. To everything
below they are sequences like any other, so nothing has to know about padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_slospec.models.attention.packed_batch import NewTokens
from hf_slospec.models.cuda.bucket_sizes import BUCKETS, bucket_for
from hf_slospec.models.kv_cache.pool import CachedSequence, KVPool

MAX_PADDING_SLOTS = 96  # tokens; the sizes above need no more for rows of up to 64 sequences


def padded(
    parts: Sequence[NewTokens], logit_rows: torch.Tensor, pool: KVPool
) -> tuple[list[NewTokens], torch.Tensor] | None:
    """The parts, and ghosts; the rows whose logits are wanted, and the first of them again as often as it takes.

    None if the row is larger than the largest size, or needs more ghosts than there are.
    """
    lengths = [len(part.input_ids) for part in parts]
    num_parts, num_tokens = bucket_for(len(parts)), sum(lengths)
    total = bucket_for(num_tokens + num_parts - len(parts))
    if num_parts == len(parts) and total > num_tokens:  # the missing tokens need a ghost
        num_parts = bucket_for(num_parts + 1)
        total = bucket_for(num_tokens + num_parts - len(parts))
    missing, num_padding_slots = total - num_tokens, num_parts - len(parts)
    if total > BUCKETS[-1] or missing > pool.num_padding_slots:
        return None
    ghosts, start = [], pool.num_slots
    for index in range(num_padding_slots):
        length = missing * (index + 1) // num_padding_slots - missing * index // num_padding_slots
        ghosts.append(_padding_sequence(CachedSequence(start, length), parts[0].mask.device))
        start += length
    num_rows = total if 2 * len(logit_rows) > total else bucket_for(len(logit_rows))
    return [*parts, *ghosts], F.pad(logit_rows, (0, num_rows - len(logit_rows)))


def _padding_sequence(sequence: CachedSequence, device: torch.device) -> NewTokens:
    zeros = torch.zeros(sequence.capacity, dtype=torch.int64, device=device)
    return NewTokens(sequence, zeros, zeros, torch.eye(sequence.capacity, dtype=torch.bool, device=device))
