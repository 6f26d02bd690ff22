"""Plan of attention that is computed sequence by sequence, each over its own slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_slospec.models.batch.packed_batch import PackedBatch, Plan


@dataclass(frozen=True, eq=False)
class SequenceKeys:
    """Tokens of one sequence in a packed batch, and the slots that they see: committed tokens, then staged ones."""

    tokens: slice  # in the batch
    slots: slice
    staged_mask: torch.Tensor  # [num_tokens, num_staged] bool, see Span
    staged_positions: torch.Tensor  # [num_staged] int64
    # [repeats * num_tokens, num_slots] additive; None: all slots may be attended to, or the plan is not completed.
    mask: torch.Tensor | None = None

    def seen(self, window: int | None, chunk: int | None) -> torch.Tensor:
        """Return which slots each token may attend to.  -> [num_tokens, num_slots] bool

        Windows and chunks count positions, not slots: a node's position is its root's plus its depth.
        """
        (num_tokens, num_staged), device = self.staged_mask.shape, self.staged_mask.device
        length = self.slots.stop - self.slots.start - num_staged
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, self.staged_mask), dim=1)
        if window is not None or chunk is not None:
            queries, keys = self._positions
            if window is not None:
                allowed = allowed & (queries - keys < window)
            if chunk is not None:
                allowed = allowed & (queries // chunk == keys // chunk)
        return allowed

    @property
    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the tokens, [num_tokens, 1] int64, and of the slots, [num_slots] int64."""
        length = self.slots.stop - self.slots.start - len(self.staged_positions)
        committed = torch.arange(length, device=self.staged_positions.device)
        return self.staged_positions[-len(self.staged_mask) :, None], torch.cat((committed, self.staged_positions))

    def biased(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the mask plus a bias by distance, see AttentionRules.  -> [num_heads, num_tokens, num_slots]"""
        queries, keys = self._positions
        by_head = bias[:, (queries - keys).clamp(0, bias.shape[1] - 1)]
        return by_head if self.mask is None else by_head + self.mask


@dataclass(frozen=True, eq=False)
class SequencePlan(Plan):
    """Sequences of a packed batch with their masks, for layers with one window and chunk."""

    sequences: list[SequenceKeys]
    window: int | None
    chunk: int | None
    repeats: int  # queries per token
    dtype: torch.dtype  # dtype of the masks

    def completed(self, seen: torch.Tensor | None = None) -> SequencePlan:
        """Return a copy with masks, which are made on the layers' device, as they grow with the text."""
        assert seen is None, "a plan that depends on sequence lengths is not captured"
        return replace(self, sequences=[replace(own, mask=self._mask(own)) for own in self.sequences])

    def _mask(self, sequence: SequenceKeys) -> torch.Tensor | None:
        num_tokens, num_staged = sequence.staged_mask.shape
        if not num_staged:  # queries over committed tokens, which the caller has cut to the window
            return None
        allowed = sequence.seen(self.window, self.chunk)
        # On another device, reading the mask would make the host wait.
        if num_tokens == 1 and allowed.is_cpu and bool(allowed.all()):
            return None
        mask = torch.zeros_like(allowed, dtype=self.dtype).masked_fill_(~allowed, float("-inf"))
        return mask.repeat(self.repeats, 1)


def plan_sequences(
    batch: PackedBatch, window: int | None, chunk: int | None, repeats: int, dtype: torch.dtype
) -> SequencePlan:
    """Return the plan of a batch, whose masks repeat each of a sequence's tokens ``repeats`` times."""
    sequences = [
        SequenceKeys(slice(span.begin, span.end), slots, span.staged_mask_for(window), span.staged_positions)
        for span, slots in zip(batch.spans, batch.visible, strict=True)
    ]
    return SequencePlan(sequences, window, chunk, repeats, dtype)
