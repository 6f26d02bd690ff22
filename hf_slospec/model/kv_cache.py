"""Storage of K and V that the sequences of one model share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch

from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.batch import CachedSequence, LayerShape
from hf_slospec.model.memory import (
    as_memory_error,
    holders_of_idle_memory,
    lazy_zeros,
    uninterrupted,
)
from hf_slospec.model.transfer import to_device

if TYPE_CHECKING:
    from hf_slospec.model.paths import ForwardPath


class KVPool:
    """Slots of K and V for all layers; a slot holds one token.

    K or V of the same shape share one tensor over all layers, so that moving tokens costs one copy
    per shape, not per layer. Sequences are referenced weakly: the slots of a sequence that was
    garbage collected are free."""

    def __init__(self, layout: Sequence[LayerShape], num_slots: int, num_padding_slots: int = 0):
        """Allocate ``num_slots`` slots for sequences, followed by ``num_padding_slots`` that
        padding writes to.
        """
        self.num_slots = num_slots
        self.num_padding_slots = num_padding_slots
        kinds = [stored for shape in layout for stored in shape.stored]
        num_rows = num_slots + num_padding_slots
        # Zeros, not empty: the 4d_mask reference multiplies masked slots by a weight of 0, and 0 *
        # NaN is NaN.
        with torch.inference_mode(False):  # the pool may outlive the caller's inference mode
            self._stacks = {
                kind: lazy_zeros(
                    (kinds.count(kind), num_rows, kind.num_heads, kind.dim), kind.dtype, kind.device
                )
                for kind in dict.fromkeys(kinds)
            }
        layers = {kind: iter(stack) for kind, stack in self._stacks.items()}
        # By layer: K, V and index keys if it has any, each [num_slots + num_padding_slots,
        # num_heads, dim].
        self.layers = [[next(layers[kind]) for kind in shape.stored] for shape in layout]
        self.keys = [layer[0] for layer in self.layers]
        self.values = [layer[1] for layer in self.layers]
        self.index_keys = [layer[2] if len(layer) > 2 else None for layer in self.layers]
        self.sequences = WeakSet[CachedSequence]()
        devices = {stack.device for stack in self._stacks.values() if stack.device.type == "cuda"}
        self._streams = {
            device: torch.cuda.current_stream(device) for device in devices
        }  # last users of the pool

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds."""
        return self.num_slots - sum(sequence.capacity for sequence in self.sequences)

    @property
    def num_bytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def follow_streams(self) -> None:
        """Let the current CUDA streams wait for the streams that used the pool last, if these
        differ.
        """
        for device, last in self._streams.items():
            if (current := torch.cuda.current_stream(device)) != last:
                current.wait_stream(last)
                for stack in self._stacks.values():
                    if stack.device == device:
                        stack.record_stream(current)
                self._streams[device] = current

    def place(self, sequence: CachedSequence, capacity: int) -> None:
        """Give a sequence, known or new, a range of ``capacity`` slots.

        It grows in its place, or else moves to a gap; if no gap is large enough, all sequences
        move together.

        Raises:
            MemoryError: not so many slots are free; nothing has changed.
            torch.OutOfMemoryError: there was no memory for a copy; all sequences keep their K/V.
        """
        if (more := capacity - sequence.capacity) > self.num_free:
            raise MemoryError(
                f"{more} more KV slots are needed, and {self.num_free} of {self.num_slots} are free"
            )
        ranges = sorted(self.sequences, key=lambda other: other.start)
        starts = [0, *(other.start + other.capacity for other in ranges)]
        ends = [*(other.start for other in ranges), self.num_slots]
        gaps = zip(starts, ends, strict=True)
        large = [start for start, end in gaps if end - start >= capacity]
        is_new = sequence not in self.sequences
        behind = len(ranges) if is_new else ranges.index(sequence) + 1
        if is_new or ends[behind] - starts[behind] < more:
            if large:
                self._shift(sequence, large[0])
            else:
                start = 0
                for other in ranges[:behind]:
                    self._shift(other, start)
                    start += other.capacity
                end = self.num_slots
                for other in reversed(ranges[behind:]):
                    end -= other.capacity
                    self._shift(other, end)
                if is_new:
                    sequence.start = start
        sequence.capacity = capacity
        self.sequences.add(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Free a sequence's slots; KeyError if it has none here."""
        self.sequences.remove(sequence)
        sequence.start = sequence.capacity = sequence.length = sequence.staged_end = 0
        sequence.position_offset = 0
        sequence.states = None

    def _shift(self, sequence: CachedSequence, start: int) -> None:
        if sequence.start != start:
            self._copy_slots(self, sequence.start, start, sequence.num_written)
            sequence.start = start

    def _copy_slots(self, source: KVPool, begin: int, start: int, number: int) -> None:
        """Copy slots from ``begin`` on of a pool of the same layers to those from ``start`` on."""
        cached = [stack[:, begin : begin + number] for stack in source._stacks.values()]
        if source is self and abs(begin - start) < number:
            cached = [slots.clone() for slots in cached]
        for stack, slots in zip(self._stacks.values(), cached, strict=True):
            stack[:, start : start + number] = slots

    def copy(self, source: CachedSequence, destination: CachedSequence, length: int) -> None:
        """Give one sequence the K/V of the first ``length`` tokens of another.

        Raises:
            torch.OutOfMemoryError: there was no memory for its states; both sequences are
            unchanged.
        """
        states = None
        if source.states is not None:
            source.states.take_in(length)
            states = source.states.copy()
        self._copy_slots(self, source.start, destination.start, length)
        destination.length = length
        destination.position_offset = source.position_offset
        destination.states = states

    def take_over(self, other: KVPool, capacities: Mapping[CachedSequence, int]) -> None:
        """Move the sequences of another pool of the same layers, and new ones, to this empty pool,
        with these capacities.
        """
        starts = list(itertools.accumulate(capacities.values(), initial=0))
        for sequence, start in zip(capacities, starts, strict=False):
            self._copy_slots(other, sequence.start, start, sequence.num_written)
        for sequence, start in zip(capacities, starts, strict=False):
            sequence.start = start
            sequence.capacity = capacities[sequence]
        self.sequences.update(capacities)

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the K/V of whole slots, all layers at once; reads all of them before it writes."""
        if not source:
            return
        for stack in self._stacks.values():
            from_slots, to_slots = to_device(
                [torch.tensor(source, device="cpu"), torch.tensor(destination, device="cpu")],
                stack.device,
            )
            stack.index_copy_(1, to_slots, stack.index_select(1, from_slots))

    def check(self) -> None:
        """Raise AssertionError if sequences share slots or exceed their capacities or the pool."""
        held = sorted(
            (sequence.start, sequence.capacity, sequence.length) for sequence in self.sequences
        )
        starts = [start for start, _, _ in held] + [self.num_slots]
        for (start, capacity, length), following in zip(held, starts[1:], strict=True):
            assert 0 <= length <= capacity and start + capacity <= following, (
                "KV slots belong to two sequences"
            )


class KVCache:
    """K/V of all sequences of one model, in one pool that grows with them.

    All generate calls, the batcher, the trial and measurements of a model share it
    (:attr:`PackedModel.kv_cache`) while any of them refers to it. The slots of a sequence that was
    garbage collected are free. Callers must hold the model's lock. Between two steps of one user,
    another may move its sequences, so their slots must be read in every step."""

    def __init__(self, new_pool: Callable[[int], KVPool], pool: KVPool):
        """Start with ``pool``; ``new_pool`` makes larger ones, given a number of slots."""
        self._new_pool = new_pool
        self._pool = pool

    @property
    def pool(self) -> KVPool:
        """The storage, for use on the current CUDA streams."""
        self._pool.follow_streams()
        return self._pool

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.num_bytes

    @property
    def num_held(self) -> int:
        """Slots that sequences hold."""
        return self._pool.num_slots - self._pool.num_free

    @uninterrupted()
    @as_memory_error()
    def reserve(
        self, capacities: Mapping[CachedSequence, int], max_slots: int | None = None
    ) -> None:
        """Give sequences, including new ones, at least these capacities; K/V of all sequences may
        move.

        The pool is enlarged if too few slots are free: to twice its size, but not beyond
        ``max_slots`` unless that is less than what the sequences need.

        Raises:
            MemoryError: there is not enough memory; all sequences keep their K/V and new ones have
                no slots.
        """
        larger = {
            sequence: slots for sequence, slots in capacities.items() if slots > sequence.capacity
        }
        pool = self.pool
        held = {sequence: sequence.capacity for sequence in pool.sequences}
        if (needed := sum((held | larger).values())) > pool.num_slots:
            if pool.num_slots and not held:  # free its memory before the new one is allocated
                pool = self._pool = self._new_pool(0)
            doubled = 2 * pool.num_slots
            grown = self._new_pool(
                max(needed, doubled if max_slots is None else min(doubled, max_slots))
            )
            grown.take_over(pool, held | larger)
            self._pool = grown
            return
        try:
            for sequence, capacity in larger.items():
                pool.place(sequence, capacity)
        except BaseException:
            for sequence in set(pool.sequences) - held.keys():
                pool.release(sequence)
            raise

    def release(self, sequence: CachedSequence) -> None:
        """Free a sequence's slots."""
        self._pool.release(sequence)

    def trim(self) -> None:
        """Free the storage if no sequence is left."""
        if not self._pool.sequences:
            self._pool = self._new_pool(0)

    @contextlib.contextmanager
    def temporary(self, capacities: Sequence[int]) -> Iterator[list[CachedSequence]]:
        """Yield new sequences of these capacities, and release them at the end."""
        sequences = [CachedSequence() for _ in capacities]
        self.reserve(dict(zip(sequences, capacities, strict=True)))
        try:
            yield sequences
        finally:
            for sequence in sequences:
                self.release(sequence)

    def write(
        self, sequence: CachedSequence, layers: Iterable[Sequence[torch.Tensor]], end: int
    ) -> None:
        """Write to the slots of a sequence before the ``end``-th.

        Args:
            layers: K, V and index keys of each layer, [num_heads, num_given, dim]: of all the
                tokens, or of the last ones if a sliding window has dropped the tokens before them.
        """
        end += sequence.start
        for layer, tensors in zip(self.pool.layers, layers, strict=True):
            for stored, tensor in zip(layer, tensors, strict=True):
                stored[end - tensor.shape[1] : end] = tensor.transpose(0, 1).to(stored)


class SharedCache:
    """Holder of a model's cache, which is freed with the last reference to it."""

    def __init__(self, layout: Sequence[LayerShape], paths: Sequence[ForwardPath]):
        """Begin without a cache.

        Args:
            layout: shapes of the layers' K and V.
            paths: forward paths that use the pools.
        """
        self._layout = layout
        self._paths = paths
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Begin with an empty cache: the threads that use it stayed with the parent."""
        self._lock = Lock()
        self._shared: Callable[[], KVCache | None] = lambda: None  # a weak reference
        self._idle_pool: KVPool | None = None  # kept for a path while it has no user

    def get(self) -> KVCache:
        """Return the cache, a new one if there is none."""
        with self._lock:
            cache = self._shared()
            if cache is None:
                cache = KVCache(self._new_pool, self._idle_pool or self._new_pool(0))
                self._shared = ref(cache)
            return cache

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage, in use or kept."""
        storage = self._shared() or self._idle_pool
        return 0 if storage is None else storage.num_bytes

    def _new_pool(self, num_slots: int) -> KVPool:
        self._idle_pool = None  # replaced by the new pool, and freed with its graphs
        num_padding_slots = max(path.num_padding_slots for path in self._paths)
        return KVPool(self._layout, num_slots, num_padding_slots if num_slots else 0)

    def keep_if_used(self, cache: KVCache) -> None:
        """Keep the pool of a cache that may become idle, if it is small and a path uses it.

        A pool that no path uses is freed at once, as others may refer to the cache for long."""
        max_bytes = max(path.max_idle_bytes(cache.pool) for path in self._paths)
        if not max_bytes:
            cache.trim()
        self._idle_pool = cache.pool if cache.num_bytes <= max_bytes else None
        holders_of_idle_memory.add(self)

    def free_idle_memory(self) -> None:
        """Free the pool that was kept, unless it is in use."""
        self._idle_pool = None
