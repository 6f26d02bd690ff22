"""KV slots: ranges never overlap and all come back, moves read before they write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_gap_is_used_before_others_are_moved():
    pool = new_pool()
    first, gone, last = (CachedSequence() for _ in range(3))
    for sequence, capacity in ((first, 8), (gone, 6), (last, 4)):
        pool.place(sequence, capacity)
    pool.release(gone)
    new = CachedSequence()
    pool.place(new, 5)
    assert (first.start, new.start, last.start) == (0, 8, 14)
    pool.place(last, 9)  # in its place
    assert last.start == 14
    with pytest.raises(MemoryError, match="3 more KV slots are needed, and 2 of 24 are free"):
        pool.place(new, 8)
    pool.place(first, 10)  # others make room
    assert (first.start, new.start, last.start) == (0, 10, 15)
    pool.check()


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
