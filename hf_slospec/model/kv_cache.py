"""Storage of K and V for all sequences of one model. Which nodes' K/V is kept or dropped after a
step is decided in target.py and batch.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch

from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.batch import CachedSequence, LayerShape, Stored
from hf_slospec.model.memory import (
    as_memory_error,
    holders_of_idle_memory,
    lazy_zeros,
    uninterrupted,
)
from hf_slospec.model.transfer import to_device

if TYPE_CHECKING:
    from hf_slospec.model.paths import ForwardPath


NUM_PARTS = 2  # tensors that layers with the same shape of K or V are divided among


class KVPool:
    """Tensors with slots for K and V of all layers; a slot holds one token.

    Layers whose K or V have the same shape share two tensors: moving tokens costs two copies per
    shape, not one per layer, and enlarging the pool needs a second copy of one of them at a time.
    Sequences are referenced weakly: the slots of a sequence that was garbage collected are free.
    """

    def __init__(self, layout: Sequence[LayerShape], num_slots: int, num_padding_slots: int = 0):
        """Allocate the slots.

        Args:
            layout: shapes of K and V, by layer.
            num_slots: slots for sequences.
            num_padding_slots: slots behind them, which padding tokens of CUDA graphs write to.
        """
        self.num_slots = num_slots
        self.num_padding_slots = num_padding_slots
        self._layout = layout
        kinds = [stored for shape in layout for stored in shape.stored]
        num_rows = num_slots + num_padding_slots
        self._stacks: dict[tuple[Stored, int], torch.Tensor] = {}
        for kind, number in Counter(kinds).items():
            for part in range(NUM_PARTS):
                size = number * (part + 1) // NUM_PARTS - number * part // NUM_PARTS
                if size:
                    self._stacks[kind, part] = _zeros(size, num_rows, kind)
        self._list_layers()
        self.sequences = WeakSet[CachedSequence]()
        devices = {stack.device for stack in self._stacks.values() if stack.device.type == "cuda"}
        # CUDA streams that used the pool last, by device.
        self._streams = {device: torch.cuda.current_stream(device) for device in devices}

    def _list_layers(self) -> None:
        kinds = dict.fromkeys(kind for kind, _ in self._stacks)
        layers = {
            kind: iter(
                [s for (own, _), stack in self._stacks.items() if own == kind for s in stack]
            )
            for kind in kinds
        }
        # By layer: K, V and index keys if it has any, each [num_slots + num_padding_slots,
        # num_heads, dim].
        self.layers = [[next(layers[kind]) for kind in shape.stored] for shape in self._layout]
        self.keys = [layer[0] for layer in self.layers]
        self.values = [layer[1] for layer in self.layers]
        self.index_keys = [layer[2] if len(layer) > 2 else None for layer in self.layers]

    @property
    def num_free(self) -> int:
        """Number of slots that no sequence holds."""
        return self.num_slots - sum(sequence.capacity for sequence in self.sequences)

    @property
    def num_bytes(self) -> int:
        """Bytes of all K and V tensors."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def follow_streams(self) -> None:
        """Make the current CUDA streams wait for the streams that used the pool last, if they
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
        """Give a sequence, which may be new to the pool, a range of ``capacity`` slots.

        The sequence grows where it is if the slots behind it are free, or else moves to a large
        enough gap between other sequences. If there is no such gap, all sequences are moved
        together.

        Raises:
            MemoryError: fewer slots are free; nothing has changed.
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
        """Free a sequence's slots. Raises KeyError if it has none in this pool."""
        self.sequences.remove(sequence)
        sequence.start = sequence.capacity = sequence.length = sequence.staged_end = 0
        sequence.position_offset = 0
        sequence.states = None

    def _shift(self, sequence: CachedSequence, start: int) -> None:
        if sequence.start != start:
            self._copy_slots(self, sequence.start, start, sequence.num_written)
            sequence.start = start

    def _copy_slots(self, source: KVPool, begin: int, start: int, number: int) -> None:
        """Copy ``number`` slots from another pool with the same layers: from its slot ``begin`` on
        to this pool's slots from ``start`` on.
        """
        cached = [stack[:, begin : begin + number] for stack in source._stacks.values()]
        if source is self and abs(begin - start) < number:
            cached = [slots.clone() for slots in cached]
        for stack, slots in zip(self._stacks.values(), cached, strict=True):
            stack[:, start : start + number] = slots

    def copy(self, source: CachedSequence, destination: CachedSequence, length: int) -> None:
        """Copy the K/V of the first ``length`` tokens of one sequence to another.

        Raises:
            torch.OutOfMemoryError: there was no memory for the states; both sequences are
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

    def take_over(self, other: KVPool, num_slots: int) -> None:
        """Take over all sequences of a pool with the same layers and fewer slots; they keep their
        slots.

        This pool has no slots and gets ``num_slots``. The other one's tensors are freed one after
        the other, so that there is never a second copy of all, and it cannot be used afterwards.

        Raises:
            torch.OutOfMemoryError: if that is before the first tensor, neither pool has changed;
                else this pool has all sequences, and the other one's number of slots.
        """
        taken = dict[tuple[Stored, int], torch.Tensor]()
        num_rows = num_slots + other.num_padding_slots
        is_whole = False
        try:
            for key in other._stacks:
                stack = other._stacks[key]
                larger = _zeros(len(stack), num_rows, key[0])
                for sequence in other.sequences:
                    used = slice(sequence.start, sequence.start + sequence.num_written)
                    larger[:, used] = stack[:, used]
                taken[key] = larger
                other._stacks[key] = self._stacks[key]  # without slots
                other._list_layers()
                del stack
            is_whole = True
        finally:
            if taken or is_whole:  # layers with states alone have no tensors
                self._stacks = other._stacks | taken
                self._list_layers()
                self.num_slots = num_slots if is_whole else other.num_slots
                self.num_padding_slots = other.num_padding_slots
                self.sequences.update(other.sequences)

    def spread(self, capacities: Mapping[CachedSequence, int]) -> None:
        """Give all sequences of the pool, and new ones, as many slots as they hold or more.

        Raises:
            torch.OutOfMemoryError: there was no memory for a copy; all sequences keep their K/V and
                their number of slots.
        """
        ranges = sorted(self.sequences, key=lambda sequence: sequence.start)
        new = [sequence for sequence in capacities if sequence not in self.sequences]
        starts = list(
            itertools.accumulate((capacities[each] for each in (*ranges, *new)), initial=0)
        )
        # First all move to the left, where they are in the way of none, then from the last one on
        # to the right.
        least = itertools.accumulate((each.capacity for each in ranges), initial=0)
        for sequence, start in zip(ranges, least, strict=False):
            self._shift(sequence, start)
        for sequence, start in reversed(list(zip(ranges, starts, strict=False))):
            self._shift(sequence, start)
        for sequence, start in zip((*ranges, *new), starts, strict=False):
            sequence.start = start
            sequence.capacity = capacities[sequence]
        self.sequences.update(new)

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy K/V of all layers between slots. All ``source`` slots are read before the first is
        written.
        """
        if not source:
            return
        slots = [torch.tensor(source, device="cpu"), torch.tensor(destination, device="cpu")]
        on_devices = {
            device: to_device(slots, device)
            for device in dict.fromkeys(stack.device for stack in self._stacks.values())
        }
        for stack in self._stacks.values():
            from_slots, to_slots = on_devices[stack.device]
            stack.index_copy_(1, to_slots, stack.index_select(1, from_slots))

    def check(self) -> None:
        """Raise AssertionError if two sequences share slots, or one exceeds its capacity or the
        pool.
        """
        held = sorted(
            (sequence.start, sequence.capacity, sequence.length) for sequence in self.sequences
        )
        starts = [start for start, _, _ in held] + [self.num_slots]
        for (start, capacity, length), following in zip(held, starts[1:], strict=True):
            assert 0 <= length <= capacity and start + capacity <= following, (
                "KV slots belong to two sequences"
            )


def _zeros(number: int, num_rows: int, kind: Stored) -> torch.Tensor:
    """Return K or V of a number of layers.  -> [number, num_rows, num_heads, dim]

    Zeros rather than uninitialised memory: dense attention multiplies masked slots by a weight of
    0, and 0 * NaN is NaN.
    """
    with torch.inference_mode(False):  # the pool may outlive the caller's inference mode
        return lazy_zeros((number, num_rows, kind.num_heads, kind.dim), kind.dtype, kind.device)


class KVCache:
    """K/V of all sequences of one model, in one pool that is enlarged as needed.

    All generate calls, the batcher, the trial and measurements of a model share it
    (:attr:`PackedModel.kv_cache`) as long as one of them refers to it. Callers must hold the
    model's lock. Between two steps of one caller another may move its sequences, so slots must be
    read anew in every step.
    """

    def __init__(self, new_pool: Callable[[int], KVPool], pool: KVPool):
        """Start with a pool.

        Args:
            new_pool: returns a new pool with the given number of slots.
            pool: the first pool.
        """
        self._new_pool = new_pool
        self._pool = pool

    @property
    def pool(self) -> KVPool:
        """The pool, for use on the current CUDA streams."""
        self._pool.follow_streams()
        return self._pool

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.num_bytes

    @property
    def num_held(self) -> int:
        """Number of slots that sequences hold."""
        return self._pool.num_slots - self._pool.num_free

    @uninterrupted()
    @as_memory_error()
    def reserve(
        self, capacities: Mapping[CachedSequence, int], max_slots: int | None = None
    ) -> None:
        """Give sequences, which may be new, at least these capacities; this may move K/V of all
        sequences.

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
            doubled = 2 * pool.num_slots if held else 0
            number = max(needed, doubled if max_slots is None else min(doubled, max_slots))
            if not held:  # free the empty pool before allocating a larger one
                pool = self._pool = self._new_pool(0)
                pool = self._pool = self._new_pool(number)
            else:
                grown = self._new_pool(0)
                try:
                    grown.take_over(pool, number)
                finally:
                    if grown.num_slots:
                        pool = self._pool = grown
            pool.spread(held | larger)
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
        """Free the pool's memory if no sequence is left."""
        if not self._pool.sequences:
            self._pool = self._new_pool(0)

    @contextlib.contextmanager
    def temporary(self, capacities: Sequence[int]) -> Iterator[list[CachedSequence]]:
        """Context manager that yields new sequences with these capacities and releases them at its
        end.
        """
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
        """Write K and V of tokens that another forward has computed to a sequence's slots.

        Args:
            sequence: the sequence to write to.
            layers: K, V and index keys (if the layer has an indexer) of each layer, [num_heads,
                num_given, dim]: for all ``end`` tokens, or only for the last ones if a sliding
                window has dropped the tokens before them.
            end: number of the sequence's first tokens, of which the given ones are the last.
        """
        end += sequence.start
        for layer, tensors in zip(self.pool.layers, layers, strict=True):
            for stored, tensor in zip(layer, tensors, strict=True):
                stored[end - tensor.shape[1] : end] = tensor.transpose(0, 1).to(stored)


class SharedCache:
    """Weak reference to a model's K/V cache: the cache is created on first use and freed with the
    last reference to it.
    """

    def __init__(self, layout: Sequence[LayerShape], paths: Sequence[ForwardPath]):
        """Begin without a cache.

        Args:
            layout: shapes of the layers' K and V.
            paths: forward paths of the model; they say how many padding slots they need, and how
                large a pool they keep without users.
        """
        self._layout = layout
        self._paths = paths
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Forget the cache: the threads that use it exist in the parent process only."""
        self._lock = Lock()
        # Returns the cache, or None if there is none; later a weak reference.
        self._shared: Callable[[], KVCache | None] = lambda: None
        # Pool kept while no caller uses it, since a path's CUDA graphs refer to its memory.
        self._idle_pool: KVPool | None = None

    def get(self) -> KVCache:
        """Return the cache; create it if no caller refers to one."""
        with self._lock:
            cache = self._shared()
            if cache is None:
                cache = KVCache(self._new_pool, self._idle_pool or self._new_pool(0))
                self._shared = ref(cache)
            return cache

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, whether it is in use or kept idle."""
        storage = self._shared() or self._idle_pool
        return 0 if storage is None else storage.num_bytes

    def _new_pool(self, num_slots: int) -> KVPool:
        self._idle_pool = None  # freed with the CUDA graphs that refer to it
        num_padding_slots = max(path.num_padding_slots for path in self._paths)
        return KVPool(self._layout, num_slots, num_padding_slots if num_slots else 0)

    def keep_if_used(self, cache: KVCache) -> None:
        """Keep the pool of a cache that a caller has stopped using, if a path's CUDA graphs need it
        and it is small.

        If no path needs the pool, it is freed now, as other objects may refer to the cache for
        long.
        """
        max_bytes = max(path.max_idle_bytes(cache.pool) for path in self._paths)
        if not max_bytes:
            cache.trim()
        self._idle_pool = cache.pool if cache.num_bytes <= max_bytes else None
        holders_of_idle_memory.add(self)

    def free_idle_memory(self) -> None:
        """Free the pool that is kept idle. A pool in use is not affected."""
        self._idle_pool = None
