"""Packed rows come in few sizes: what is missing is filled up with tokens of sequences that belong to nobody.

These ghosts have slots of their own behind a pool's others, and each of their tokens sees itself only. To everything
below they are sequences like any other, so nothing has to know about padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_slospec.models.attention.row import Fresh
from hf_slospec.models.kv_pool import CachedSequence, KVPool
from hf_slospec.models.sizes import SIZES, size_for

MAX_GHOSTS = 96  # tokens; the sizes above need no more for rows of up to 64 sequences


def padded(parts: Sequence[Fresh], logit_rows: torch.Tensor, pool: KVPool) -> tuple[list[Fresh], torch.Tensor] | None:
    """The parts, and ghosts; the rows whose logits are wanted, and the first of them again as often as it takes.

    None if the row is larger than the largest size, or needs more ghosts than there are.
    """
    lengths = [len(part.input_ids) for part in parts]
    num_parts, num_tokens = size_for(len(parts)), sum(lengths)
    total = size_for(num_tokens + num_parts - len(parts))
    if num_parts == len(parts) and total > num_tokens:  # the missing tokens need a ghost
        num_parts = size_for(num_parts + 1)
        total = size_for(num_tokens + num_parts - len(parts))
    missing, num_ghosts = total - num_tokens, num_parts - len(parts)
    if total > SIZES[-1] or missing > pool.num_ghosts:
        return None
    ghosts, start = [], pool.num_slots
    for index in range(num_ghosts):
        length = missing * (index + 1) // num_ghosts - missing * index // num_ghosts
        ghosts.append(_ghost(CachedSequence(start, length), parts[0].mask.device))
        start += length
    num_rows = total if 2 * len(logit_rows) > total else size_for(len(logit_rows))
    return [*parts, *ghosts], F.pad(logit_rows, (0, num_rows - len(logit_rows)))


def _ghost(sequence: CachedSequence, device: torch.device) -> Fresh:
    zeros = torch.zeros(sequence.capacity, dtype=torch.int64, device=device)
    return Fresh(sequence, zeros, zeros, torch.eye(sequence.capacity, dtype=torch.bool, device=device))
