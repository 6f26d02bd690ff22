"""Plan of a packed batch for the operators of compiled forwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_slospec.models.batch.packed_batch import PackedBatch, Plan, Span


@dataclass(frozen=True, eq=False)
class SequencesPlan(Plan):
    """Sequences of a packed batch: ranges of slots and of tokens, and masks among staged tokens."""

    # [num_sequences, 6] int32: first slot, committed tokens, staged tokens, first token in the batch, tokens in the
    # batch, and 1 for chains
    sequences: torch.Tensor
    mask: torch.Tensor  # [num_tokens, max_staged] bool, True = may attend; not read for chains
    windowed_mask: torch.Tensor  # the same for layers with a sliding window
    positions: torch.Tensor  # [num_tokens] int32
    staged_positions: torch.Tensor  # [num_sequences, max_staged] int32


def plan_for_operators(batch: PackedBatch) -> SequencesPlan:
    """Return the plan of a batch with boolean masks on the host."""
    spans = batch.spans
    sequences = [
        (span.visible.start, span.sequence.length, span.num_staged, span.begin, span.num_tokens, span.is_chain)
        for span in spans
    ]
    mask = _stacked_masks([None if span.is_chain else span.staged_mask for span in spans], spans)
    windowed_mask = mask
    if any(span.windowed_mask is not None for span in spans):
        windowed_mask = _stacked_masks([span.staged_mask_for(0) for span in spans], spans)
    staged_positions = torch.zeros(len(spans), max(span.num_staged for span in spans), dtype=torch.int32, device="cpu")
    for row, span in zip(staged_positions, spans, strict=True):
        row[: span.num_staged] = span.staged_positions
    positions = torch.cat([span.staged_positions[-span.num_tokens :] for span in spans]).int()
    return SequencesPlan(
        torch.tensor(sequences, dtype=torch.int32, device="cpu"), mask, windowed_mask, positions, staged_positions
    )


def _stacked_masks(masks: list[torch.Tensor | None], spans: list[Span]) -> torch.Tensor:
    """Return the masks below each other, padded with False.  -> [num_tokens, max_staged] bool"""
    width = max((mask.shape[1] for mask in masks if mask is not None), default=1)
    stacked = torch.zeros(spans[-1].end, width, dtype=torch.bool, device="cpu")
    for span, mask in zip(spans, masks, strict=True):
        if mask is not None:
            stacked[span.begin : span.end, : mask.shape[1]] = mask
    return stacked
