"""Storage of K and V that the sequences of one model share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import numpy as np
import torch

from hf_slospec.models.batch.cached_sequence import CachedSequence, LayerShape
from hf_slospec.models.device.transfer import to_device


class KVPool:
    """Slots of K and V for all layers; a slot holds one token.

    K or V of the same shape share one tensor over all layers, so that moving tokens costs one copy per shape, not per
    layer. Sequences are referenced weakly: the slots of a sequence that was garbage collected are free.
    """

    def __init__(self, layout: Sequence[LayerShape], num_slots: int, num_padding_slots: int = 0):
        """Allocate ``num_slots`` slots for sequences, followed by ``num_padding_slots`` that padding writes to."""
        self.num_slots, self.num_padding_slots = num_slots, num_padding_slots
        kinds, num_rows = [stored for shape in layout for stored in shape.stored], num_slots + num_padding_slots
        # Zeros, not empty: the 4d_mask reference multiplies masked slots by a weight of 0, and 0 * NaN is NaN.
        with torch.inference_mode(False):  # the pool may outlive the caller's inference mode
            self._stacks = {
                kind: _zeros((kinds.count(kind), num_rows, kind.num_heads, kind.dim), kind.dtype, kind.device)
                for kind in set(kinds)
            }
        layers = {kind: iter(stack) for kind, stack in self._stacks.items()}
        # By layer: K, V and index keys if it has any, each [num_slots + num_padding_slots, num_heads, dim].
        self.layers = [[next(layers[kind]) for kind in shape.stored] for shape in layout]
        self.keys, self.values = [layer[0] for layer in self.layers], [layer[1] for layer in self.layers]
        self.index_keys = [layer[2] if len(layer) > 2 else None for layer in self.layers]
        self.sequences = WeakSet[CachedSequence]()
        devices = {stack.device for stack in self._stacks.values() if stack.device.type == "cuda"}
        self._streams = {device: torch.cuda.current_stream(device) for device in devices}  # last users of the pool

    @property
    def _free(self) -> list[tuple[int, int]]:
        """Free ranges of slots [start, end), in ascending order."""
        held = sorted((sequence.start, sequence.start + sequence.capacity) for sequence in self.sequences)
        starts, ends = [0, *(end for _, end in held)], [*(start for start, _ in held), self.num_slots]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds."""
        return sum(end - start for start, end in self._free)

    @property
    def largest_free(self) -> int:
        """Slots of the longest free range."""
        return max((end - start for start, end in self._free), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def follow_streams(self) -> None:
        """Let the current CUDA streams wait for the streams that used the pool last, if these differ."""
        for device, last in self._streams.items():
            if (current := torch.cuda.current_stream(device)) != last:
                current.wait_stream(last)
                for stack in self._stacks.values():
                    if stack.device == device:
                        stack.record_stream(current)
                self._streams[device] = current

    def place(self, sequence: CachedSequence, capacity: int) -> None:
        """Move a sequence, or add a new one, to the first free range of ``capacity`` slots.

        Raises:
            MemoryError: no free range is that long; nothing has changed.
        """
        start = next((start for start, end in self._free if end - start >= capacity), None)
        if start is None:
            raise MemoryError(
                f"no range of {capacity} KV slots is free ({self.num_free} of {self.num_slots} are, in pieces)"
            )
        self._copy(self, {sequence: start})
        sequence.start, sequence.capacity = start, capacity
        self.sequences.add(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Free a sequence's slots; KeyError if it has none here."""
        self.sequences.remove(sequence)
        sequence.start = sequence.capacity = sequence.length = sequence.position_offset = 0
        sequence.states = None

    def repack(self, capacities: Mapping[CachedSequence, int]) -> None:
        """Lay out all sequences of the pool side by side from slot 0, with capacities no smaller than theirs.

        Raises:
            torch.OutOfMemoryError: there was no memory for a copy; every sequence still has its K/V.
        """
        in_order = sorted(capacities, key=lambda sequence: sequence.start)
        # First close all gaps from the start, then move apart from the end, so that nothing is overwritten.
        starts = itertools.accumulate((sequence.capacity for sequence in in_order), initial=0)
        for sequence, start in zip(in_order, starts, strict=False):
            self._shift(sequence, start)
        starts = itertools.accumulate((capacities[sequence] for sequence in in_order), initial=0)
        for sequence, start in reversed(list(zip(in_order, starts, strict=False))):
            self._shift(sequence, start)
            sequence.capacity = capacities[sequence]

    def _shift(self, sequence: CachedSequence, start: int) -> None:
        if sequence.start != start:
            slots = slice(sequence.start, sequence.start + sequence.length)
            cached = [stack[:, slots].clone() for stack in self._stacks.values()]  # the two ranges may overlap
            for stack, tokens in zip(self._stacks.values(), cached, strict=True):
                stack[:, start : start + sequence.length] = tokens
            sequence.start = start

    def copy(self, source: CachedSequence, destination: CachedSequence, length: int) -> None:
        """Give one sequence the K/V of the first ``length`` tokens of another.

        Raises:
            torch.OutOfMemoryError: there was no memory for its states; both sequences are unchanged.
        """
        states = None
        if source.states is not None:
            source.states.take_in(length)
            states = source.states.copy()
        for stack in self._stacks.values():
            tokens = stack[:, source.start : source.start + length]
            stack[:, destination.start : destination.start + length] = tokens
        destination.length, destination.position_offset, destination.states = length, source.position_offset, states

    def take_over(self, other: KVPool, capacities: Mapping[CachedSequence, int]) -> None:
        """Move the sequences of another pool, and new ones, to this empty pool, with these capacities."""
        starts = itertools.accumulate(capacities.values(), initial=0)
        new_starts = dict(zip(capacities, starts, strict=False))
        self._copy(other, new_starts)
        for sequence, start in new_starts.items():
            sequence.start, sequence.capacity = start, capacities[sequence]
        self.sequences.update(new_starts)

    def _copy(self, other: KVPool, starts: Mapping[CachedSequence, int]) -> None:
        """Copy the committed K/V of sequences from a pool of the same layers to free slots of this one."""
        for kind, stack in self._stacks.items():
            for sequence, start in starts.items():
                cached = other._stacks[kind][:, sequence.start : sequence.start + sequence.length]
                stack[:, start : start + sequence.length] = cached

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the K/V of whole slots, all layers at once; reads all of them before it writes."""
        if not source:
            return
        for stack in self._stacks.values():
            from_slots, to_slots = to_device([torch.tensor(source), torch.tensor(destination)], stack.device)
            stack.index_copy_(1, to_slots, stack.index_select(1, from_slots))

    def check(self) -> None:
        """Raise AssertionError if sequences share slots or exceed their capacities or the pool."""
        held = sorted((sequence.start, sequence.capacity, sequence.length) for sequence in self.sequences)
        starts = [start for start, _, _ in held] + [self.num_slots]
        for (start, capacity, length), following in zip(held, starts[1:], strict=True):
            assert 0 <= length <= capacity and start + capacity <= following, "KV slots belong to two sequences"


ALIGNMENT = 64  # bytes; torch aligns tensors to as many


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, memory is zeroed by the operating system when it is first written.

    ``torch.zeros`` writes all of it at once, so a step that enlarges the pool would take tenths of a second longer.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    offset = -raw.data_ptr() % ALIGNMENT
    return raw[offset : offset + num_bytes].view(dtype).view(*shape)
