"""KV storage shared by the sequences of one model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_slospec.models.cuda.graphs import Graphs
from hf_slospec.models.cuda.transfer import to_device


class Stored(NamedTuple):
    """What one layer keeps of a token as its K or its V; the two may differ (multi-head latent attention, autocast)."""

    num_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Of one token."""
        return self.num_heads * self.dim * self.dtype.itemsize

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Stored:
        """``tensor``: a layer's K or V, [batch, num_heads, num_tokens, dim]."""
        return cls(tensor.shape[1], tensor.shape[-1], tensor.dtype, tensor.device)


class LayerShape(NamedTuple):
    """What one attention layer stores per token."""

    key: Stored
    value: Stored


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

    K or V of the same kind share one tensor over all layers, so that moving tokens costs one copy per kind, not per
    layer.
    """

    def __init__(self, layout: Sequence[LayerShape], num_slots: int, num_padding_slots: int = 0):
        """``num_padding_slots`` slots behind the others are nobody's: padding is written there."""
        self.num_slots, self.num_padding_slots = num_slots, num_padding_slots
        self.graphs: Graphs | None = None  # of forwards that read and write here
        kinds = [shape.key for shape in layout] + [shape.value for shape in layout]
        # Zeros, not empty: the 4d_mask reference multiplies masked slots by a weight of 0, and 0 * NaN is NaN.
        with torch.inference_mode(False):  # a caller's mode ends, and the pool may not
            self._stacks = {
                kind: torch.zeros(
                    kinds.count(kind),
                    num_slots + num_padding_slots,
                    kind.num_heads,
                    kind.dim,
                    dtype=kind.dtype,
                    device=kind.device,
                )
                for kind in set(kinds)
            }
        rows = {kind: iter(stack) for kind, stack in self._stacks.items()}
        views = [next(rows[kind]) for kind in kinds]  # each [num_slots + num_padding_slots, num_heads, dim]
        self.keys, self.values = views[: len(layout)], views[len(layout) :]
        self._free = [(0, num_slots)] if num_slots else []  # disjoint [start, end) ranges, ascending

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    @property
    def largest_free(self) -> int:
        """Slots of the longest free range."""
        return max((end - start for start, end in self._free), default=0)

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

    def repack(self, capacities: Mapping[CachedSequence, int]) -> None:
        """Lay out all sequences of the pool side by side from its front, with capacities no smaller than theirs."""
        in_order = sorted(capacities, key=lambda sequence: sequence.start)
        try:  # first together to the front, then apart from the back: nothing is overwritten
            starts = itertools.accumulate((sequence.capacity for sequence in in_order), initial=0)
            for sequence, start in zip(in_order, starts, strict=False):
                self._move_range(sequence, start)
            starts = itertools.accumulate((capacities[sequence] for sequence in in_order), initial=0)
            for sequence, start in reversed(list(zip(in_order, starts, strict=False))):
                self._move_range(sequence, start)
                sequence.capacity = capacities[sequence]
        finally:  # also if there was no memory for a move: what has been moved is where it says
            ends = [0, *(sequence.start + sequence.capacity for sequence in in_order)]
            begins = [*(sequence.start for sequence in in_order), self.num_slots]
            self._free = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def _move_range(self, sequence: CachedSequence, start: int) -> None:
        if sequence.start != start:
            for stack in self._stacks.values():
                held = stack[:, sequence.start : sequence.start + sequence.length]
                stack[:, start : start + sequence.length] = held.clone()  # the two may overlap
            sequence.start = start

    def copy_from(self, other: KVPool, theirs: CachedSequence, mine: CachedSequence) -> None:
        """Take over the committed K/V of a sequence from a pool of the same layers."""
        for kind, stack in self._stacks.items():
            own = other._stacks[kind][:, theirs.start : theirs.start + theirs.length]
            stack[:, mine.start : mine.start + theirs.length] = own

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the K/V of whole slots, all layers at once; reads everything before it writes."""
        if not source:
            return
        for stack in self._stacks.values():
            from_slots, to_slots = to_device([torch.tensor(source), torch.tensor(destination)], stack.device)
            stack.index_copy_(1, to_slots, stack.index_select(1, from_slots))
