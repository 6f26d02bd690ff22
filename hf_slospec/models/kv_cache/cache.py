"""K/V of all sequences of one model."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType

import torch

from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.kv_cache.pool import KVPool
from hf_slospec.models.recurrent.states import RecurrentStates


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt only at the end: an interrupted move of K/V would corrupt other users' sequences."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            previous(*received[0])


class KVCache:
    """K/V of all sequences of one model, in one pool that grows with them.

    All generate calls, the batcher, the trial and measurements of a model share it (:attr:`PackedModel.kv_cache`) while
    any of them refers to it. The slots of a sequence that was garbage collected are free. Callers must hold the model's
    lock. Between two steps of one user, another may move its sequences, so their slots must be read in every step.
    """

    def __init__(self, new_pool: Callable[[int], KVPool], pool: KVPool):
        """Start with ``pool``; ``new_pool`` makes larger ones, given a number of slots."""
        self._new_pool, self._pool = new_pool, pool

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

    @_uninterrupted()
    def reserve(self, capacities: Mapping[CachedSequence, int], max_slots: int | None = None) -> None:
        """Give sequences, including new ones, at least these capacities; K/V of all sequences may move.

        The pool is enlarged if too few slots are free: to twice its size, but not beyond ``max_slots`` unless that is
        less than what the sequences need.

        Raises:
            MemoryError: there is not enough memory; all sequences keep their K/V and new ones have no slots.
        """
        larger = {sequence: slots for sequence, slots in capacities.items() if slots > sequence.capacity}
        pool = self.pool
        held = {sequence: sequence.capacity for sequence in pool.sequences}
        if (needed := sum((held | larger).values())) > pool.num_slots:
            if pool.num_slots and not held:
                pool = self._pool = self._new_pool(0)  # frees its memory before the new one is allocated
            doubled = 2 * pool.num_slots
            grown = self._new_pool(max(needed, doubled if max_slots is None else min(doubled, max_slots)))
            grown.take_over(pool, held | larger)
            self._pool = grown
            return
        try:
            # From the end on: otherwise a gap behind the last sequence is moved past all of them, and back.
            for sequence in sorted(larger, key=lambda known: known.start, reverse=True):
                pool.place(sequence, larger[sequence])
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

    def load(
        self,
        sequence: CachedSequence,
        layers: Iterable[Sequence[torch.Tensor]],
        length: int,
        states: RecurrentStates | None = None,
    ) -> None:
        """Copy in the K/V of a sequence's first ``length`` tokens, and take over the states after them.

        Args:
            layers: K, V and index keys of each layer, [num_heads, num_given, dim]: of all the tokens, or of the last
                ones if a sliding window has dropped the tokens before them.
        """
        self.write(sequence, layers, length)
        sequence.length, sequence.states = length, states

    def write(self, sequence: CachedSequence, layers: Iterable[Sequence[torch.Tensor]], end: int) -> None:
        """Write K, V and index keys, as :meth:`load` takes them, to the slots of a sequence before the ``end``-th."""
        end += sequence.start
        for layer, given in zip(self.pool.layers, layers, strict=True):
            for stored, tensor in zip(layer, given, strict=True):
                stored[end - tensor.shape[1] : end] = tensor.transpose(0, 1).to(stored)
