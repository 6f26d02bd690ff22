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

from hf_slospec.models.batch.cached_sequence import CachedSequence, LayerShape
from hf_slospec.models.kv_cache.pool import KVPool
from tests.support.toys.trees import SEEDS, stored

NUM_SLOTS = 24
# Keys and values alike, of different sizes (multi-head latent attention), and a layer with other heads.
LAYOUT = [
    LayerShape(stored(heads, key_dim), stored(heads, value_dim))
    for heads, key_dim, value_dim in [(2, 4, 4), (2, 6, 4), (1, 4, 6), (2, 4, 4)]
]


def new_pool(num_slots: int = NUM_SLOTS) -> KVPool:
    return KVPool(LAYOUT, num_slots)


class Allocations(RuleBasedStateMachine):
    """The pool beside a list of the live ranges, from which free gaps are computed afresh each time."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool()
        self.sequences = list[CachedSequence]()

    def ranges(self) -> list[tuple[int, int]]:
        return sorted((sequence.start, sequence.start + sequence.capacity) for sequence in self.sequences)

    def gaps(self) -> list[tuple[int, int]]:
        edges = [0, *itertools.chain.from_iterable(self.ranges()), NUM_SLOTS]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]

    @rule(target=live, capacity=st.integers(1, NUM_SLOTS))
    def allocate(self, capacity: int) -> Any:
        fitting = [start for start, end in self.gaps() if end - start >= capacity]
        if not fitting:
            with pytest.raises(MemoryError, match=f"{capacity} KV slots"):
                self.pool.place(CachedSequence(), capacity)
            return multiple()
        self.pool.place(sequence := CachedSequence(), capacity)
        assert (sequence.start, sequence.capacity, sequence.length) == (fitting[0], capacity, 0)
        self.sequences.append(sequence)
        return sequence

    @rule(sequence=consumes(live))
    def release(self, sequence: CachedSequence) -> None:
        self.pool.release(sequence)
        self.sequences.remove(sequence)

    @invariant()
    def slots_are_live_or_free(self) -> None:
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(self.ranges()))
        assert self.pool.num_free == sum(end - start for start, end in self.gaps())

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.pool.release(sequence)
        assert self.pool.largest_free == NUM_SLOTS  # merged back into one range


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def fill(pool: KVPool) -> list[torch.Tensor]:
    """Put different numbers everywhere.  -> all views, keys and values of every layer"""
    views = [*pool.keys, *pool.values]
    for index, view in enumerate(views):
        view.copy_(torch.arange(view.numel(), dtype=view.dtype).view_as(view) + 10_000 * index)
    return views


def test_every_layer_has_storage_of_its_own_shape() -> None:
    pool = new_pool()
    assert [tuple(keys.shape) for keys in pool.keys] == [(NUM_SLOTS, *s.key[:2]) for s in LAYOUT]
    assert [tuple(values.shape) for values in pool.values] == [(NUM_SLOTS, *s.value[:2]) for s in LAYOUT]
    views = fill(pool)
    assert len(torch.cat([view.flatten() for view in views]).unique()) == sum(view.numel() for view in views)
    assert pool.num_bytes == 4 * sum(view.numel() for view in views)


@given(seed=SEEDS, num_moved=st.integers(0, NUM_SLOTS))
@settings(deadline=None)
def test_move_reads_all_slots_before_it_writes_any(seed: int, num_moved: int) -> None:
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
