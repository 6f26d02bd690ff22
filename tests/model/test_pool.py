"""KV slots: ranges never overlap and all come back, moves read before they write."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hf_slospec.model.batch import CachedSequence, LayerShape
from hf_slospec.model.kv_cache import KVPool
from tests.support.toys.trees import SEEDS, stored

NUM_SLOTS = 24
# Keys and values alike, of different sizes (multi-head latent attention), and a layer with other
# heads.
LAYOUT = [
    LayerShape(stored(heads, key_dim), stored(heads, value_dim))
    for heads, key_dim, value_dim in [(2, 4, 4), (2, 6, 4), (1, 4, 6), (2, 4, 4)]
]


def new_pool(num_slots=NUM_SLOTS):
    return KVPool(LAYOUT, num_slots)


class Allocations(RuleBasedStateMachine):
    """The pool beside a list of the live ranges, from which free gaps are computed afresh each
    time.
    """

    live = Bundle("live")

    def __init__(self):
        super().__init__()
        self.pool = new_pool()
        self.sequences = list[CachedSequence]()
        self.written = dict[CachedSequence, float]()
        self.number = 0

    def ranges(self):
        return sorted(
            (sequence.start, sequence.start + sequence.capacity) for sequence in self.sequences
        )

    def gaps(self):
        edges = [0, *itertools.chain.from_iterable(self.ranges()), NUM_SLOTS]
        return [
            (start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start
        ]

    @property
    def num_free(self):
        return sum(end - start for start, end in self.gaps())

    @rule(target=live, capacity=st.integers(1, NUM_SLOTS))
    def allocate(self, capacity: int) -> Any:
        sequence = CachedSequence()
        if capacity > self.num_free:
            with pytest.raises(MemoryError, match=f"{capacity} more KV slots"):
                self.pool.place(sequence, capacity)
            return multiple()
        self.check_place(sequence, capacity)
        self.sequences.append(sequence)
        self.write(sequence, capacity)
        return sequence

    @rule(sequence=live, more=st.integers(1, 8))
    def grow(self, sequence: CachedSequence, more: int) -> None:
        if more <= self.num_free:
            self.check_place(sequence, sequence.capacity + more)
            self.write(sequence, sequence.capacity)

    @rule(sequence=live, length=st.integers(0, NUM_SLOTS))
    def truncate(self, sequence: CachedSequence, length: int) -> None:
        sequence.truncate(length)

    def check_place(self, sequence, capacity):
        """Other sequences stay where they are if a gap is large enough."""
        before = {own: own.start for own in self.sequences if own is not sequence}
        has_room = any(end - start >= capacity for start, end in self.gaps())
        self.pool.place(sequence, capacity)
        assert sequence.capacity == capacity
        assert not has_room or all(own.start == start for own, start in before.items())

    def write(self, sequence, length):
        sequence.length = length
        self.number = self.number + 1
        for stack in (*self.pool.keys, *self.pool.values):
            stack[sequence.start : sequence.start + sequence.capacity] = self.number
        self.written[sequence] = self.number

    @rule(sequence=consumes(live))
    def release(self, sequence: CachedSequence) -> None:
        self.pool.release(sequence)
        self.sequences.remove(sequence)

    @invariant()
    def slots_are_live_or_free(self) -> None:
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(self.ranges()))
        assert self.pool.num_free == self.num_free
        self.pool.check()

    @invariant()
    def tokens_are_kept(self) -> None:
        for sequence in self.sequences:
            for stack in (*self.pool.keys, *self.pool.values):
                assert (
                    stack[sequence.start : sequence.start + sequence.length]
                    == self.written[sequence]
                ).all()

    def teardown(self):
        for sequence in self.sequences:
            self.pool.release(sequence)
        assert self.pool.num_free == NUM_SLOTS


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def fill(pool):
    """Put different numbers everywhere.  -> all views, keys and values of every layer"""
    views = [*pool.keys, *pool.values]
    for index, view in enumerate(views):
        view.copy_(torch.arange(view.numel(), dtype=view.dtype).view_as(view) + 10_000 * index)
    return views


def test_every_layer_has_storage_of_its_own_shape():
    pool = new_pool()
    assert [tuple(keys.shape) for keys in pool.keys] == [(NUM_SLOTS, *s.key[:2]) for s in LAYOUT]
    assert [tuple(values.shape) for values in pool.values] == [
        (NUM_SLOTS, *s.value[:2]) for s in LAYOUT
    ]
    views = fill(pool)
    assert len(torch.cat([view.flatten() for view in views]).unique()) == sum(
        view.numel() for view in views
    )
    assert pool.num_bytes == 4 * sum(view.numel() for view in views)


@given(seed=SEEDS, num_moved=st.integers(0, NUM_SLOTS))
@settings(deadline=None)
def test_move_reads_all_slots_before_it_writes_any(seed, num_moved):
    rng = np.random.default_rng(seed)
    source = rng.integers(0, NUM_SLOTS, num_moved).tolist()
    destination = rng.permutation(NUM_SLOTS)[:num_moved].tolist()
    pool = new_pool()
    views = fill(pool)
    before = [view.clone() for view in views]
    pool.move(source, destination)
    for view, old in zip(views, before, strict=True):
        expected = old.clone()
        for from_slot, to_slot in zip(source, destination, strict=True):
            expected[to_slot] = old[from_slot]
        assert torch.equal(view, expected)
