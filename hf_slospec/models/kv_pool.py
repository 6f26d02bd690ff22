"""KV storage shared by the sequences of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Stored(NamedTuple):
    """Shape of what one layer keeps of a token: its K or its V."""

    num_heads: int
    dim: int


class LayerShape(NamedTuple):
    """What one attention layer stores per token, and where; K and V may differ (multi-head latent attention)."""

    key: Stored
    value: Stored
    device: torch.device = torch.device("cpu")


@dataclass(eq=False)
class CachedSequence:
    """A sequence's range of slots: committed tokens first, then room for what a step stages behind them.

    Only ``length`` says what is committed, so a rejected token's K/V is forgotten without touching memory.
    """

    start: int
    capacity: int
    length: int = 0  # committed tokens; their positions are 0 .. length - 1


class KVPool:
    """Slots of K and V for all layers; a slot holds one token.

    K or V of the same shape on the same device share one tensor over all layers, so that moving tokens costs one copy
    per distinct shape, not per layer.
    """

    def __init__(self, layout: Sequence[LayerShape], num_slots: int, dtype: torch.dtype):
        self.num_slots = num_slots
        kinds = [(s.key, s.device) for s in layout] + [(s.value, s.device) for s in layout]
        # Zeros, not empty: the 4d_mask reference multiplies masked slots by a weight of 0, and 0 * NaN is NaN.
        self._stacks = {
            (stored, device): torch.zeros(kinds.count((stored, device)), num_slots, *stored, dtype=dtype, device=device)
            for stored, device in set(kinds)
        }
        rows = {kind: iter(stack) for kind, stack in self._stacks.items()}
        views = [next(rows[kind]) for kind in kinds]  # each [num_slots, num_heads, dim]
        self.keys, self.values = views[: len(layout)], views[len(layout) :]
        self._free = [(0, num_slots)]  # disjoint [start, end) ranges, ascending

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    @property
    def num_bytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks.values())

    def allocate(self, capacity: int) -> CachedSequence:
        """A range of ``capacity`` slots, first fit."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= capacity:
                self._free[index : index + 1] = [(start + capacity, end)] if end - start > capacity else []
                return CachedSequence(start, capacity)
        raise MemoryError(
            f"no range of {capacity} KV slots is free ({self.num_free} of {self.num_slots} are, in pieces)"
        )

    def release(self, sequence: CachedSequence) -> None:
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, (sequence.start, sequence.start + sequence.capacity)]):
            assert not merged or merged[-1][1] <= start, "a range of KV slots was released twice"
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the K/V of whole slots, all layers at once; reads everything before it writes."""
        if not source:
            return
        for stack in self._stacks.values():
            from_slots = torch.tensor(source, device=stack.device)
            to_slots = torch.tensor(destination, device=stack.device)
            stack.index_copy_(1, to_slots, stack.index_select(1, from_slots))
