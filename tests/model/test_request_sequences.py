"""Ranges of KV slots that grow, move and are given back, and never lose what they hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.model import sequences as rooms
from hf_slospec.model.batch import LayerShape, Stored
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.sequences import Sequences
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.packed import cached
from tests.support.toys.trees import SEEDS

MAX_NODES = 3
SHAPE = LayerShape(*[Stored(1, 1, torch.float32, torch.device("cpu"))] * 2)


class Packed:
    """As much of a packed model as storage asks for."""

    def __init__(self):
        self.version = SimpleNamespace(weights=0, notice=lambda structure=True: None)
        self.has_states = False
        self.rope = SimpleNamespace(max_plain=None)
        self.kv_cache = KVCache(lambda num_slots: KVPool([SHAPE], num_slots), KVPool([SHAPE], 0))

    def keep_if_captured(self, cache):
        cache.trim()


def mark(sequences, request):
    """Write each cached token's own value, and rubbish behind them, as steps do."""
    own = sequences.of(request)
    slots = sequences.cache.pool.keys[0][own.start : own.start + own.capacity, 0, 0]
    slots[: own.length] = torch.arange(own.length) + 1000.0 * request.index
    slots[own.length :] = -1.0


def check(sequences, requests):
    sequences.check(requests)
    for request in requests:
        (key, _), *_ = cached(sequences.cache, sequences.of(request))
        assert key.flatten().tolist() == [
            1000.0 * request.index + i for i in range(sequences.of(request).length)
        ]


@given(seed=SEEDS, limited=st.booleans(), room=st.integers(1, 9))
@settings(deadline=None, max_examples=150)
def test_texts_grow_come_and_go_and_keep_what_is_cached(seed, limited, room):
    rng = np.random.default_rng(seed)
    first_room = rooms.FIRST_ROOM
    rooms.FIRST_ROOM = room
    try:
        slots = 60
        sequences = Sequences(Packed(), MAX_NODES, slots if limited else None)  # type: ignore[arg-type]
        requests: list[Request] = []

        def longest(request):
            return request.prompt_len + request.params.max_new_tokens + MAX_NODES

        for index in range(40):
            new = Request(
                index, RequestParams([0] * int(rng.integers(1, 12)), int(rng.integers(1, 14)))
            )
            if sum(map(longest, [*requests, new])) <= slots:
                requests.append(new)
            for request in list(requests):
                if rng.random() < 0.2:
                    requests.remove(request)
                    sequences.release(request)
                elif request.num_left and rng.random() < 0.7:
                    request.tokens += [0] * int(rng.integers(1, request.num_left + 1))
            sequences.reserve(requests)
            for request in requests:
                own = sequences.of(request)
                assert len(request.tokens) + MAX_NODES <= own.capacity <= longest(request)
                assert own.length <= len(request.tokens)
            check(sequences, requests)
            for request in requests:
                sequences.of(request).length = len(request.tokens) - 1
                mark(sequences, request)
            assert not limited or sequences.cache.pool.num_slots <= slots
        for request in requests:
            sequences.release(request)
        assert sequences.cache.pool.num_free == sequences.cache.pool.num_slots
    finally:
        rooms.FIRST_ROOM = first_room


def test_more_than_the_limit_is_a_memory_error_and_changes_nothing():
    sequences = Sequences(Packed(), MAX_NODES, 20)  # type: ignore[arg-type]
    held = Request(0, RequestParams([0] * 5, 2))
    large = Request(1, RequestParams([0] * 15, 2))
    sequences.reserve([held])
    sequences.of(held).length = 4
    mark(sequences, held)
    with pytest.raises(MemoryError, match="KV slots"):
        sequences.reserve([held, large])
    check(sequences, [held])
    sequences.release(large)  # unknown ones are fine
    check(sequences, [held])


def test_where_slots_are_short_nodes_of_the_step_take_room_and_others_are_shared():
    sequences = Sequences(Packed(), MAX_NODES, 16)  # type: ignore[arg-type]
    held = Request(0, RequestParams([0] * 5, 2))
    other = Request(1, RequestParams([0] * 6, 2))
    sequences.reserve([held], [0])
    assert sequences.of(held).capacity == 7 + MAX_NODES  # there was room for the largest tree
    sequences.of(held).length = 4
    mark(sequences, held)
    sequences.reserve([held, other], [1, 0])
    assert (sequences.of(held).capacity, sequences.of(other).capacity) == (
        8,
        8,
    )  # 6 and 6 are needed, 4 are left
    check(sequences, [held, other])
    sequences.of(other).length = 5
    mark(sequences, other)
    held.tokens += [0]
    sequences.of(held).length = 5
    mark(sequences, held)
    sequences.reserve([held, other], [2, 0])
    assert sequences.of(held).capacity == 8
    check(sequences, [held, other])
    with pytest.raises(MemoryError, match="KV slots"):
        sequences.reserve([held, other], [MAX_NODES, 1 + MAX_NODES])
    check(sequences, [held, other])


@given(seed=SEEDS)
@settings(deadline=None, max_examples=100)
def test_texts_that_fit_have_slots_whatever_they_may_still_emit(seed):
    """Each may fill all slots alone; as the scheduler does, the last ones leave before a step lacks
    some.
    """
    rng = np.random.default_rng(seed)
    most = 80
    sequences, requests = Sequences(Packed(), MAX_NODES, most), list[Request]()  # type: ignore[arg-type]
    for index in range(60):
        requests.append(Request(index, RequestParams([0] * int(rng.integers(1, 20)), 60)))
        for request in requests:
            request.tokens += [0] * int(rng.integers(0, min(request.num_left, 1 + MAX_NODES) + 1))
        while sum(len(request.tokens) + MAX_NODES for request in requests) > most:
            sequences.release(requests.pop())
        num_nodes = rng.integers(0, MAX_NODES + 1, len(requests)).tolist()
        sequences.reserve(requests, num_nodes)
        for request, number in zip(requests, num_nodes, strict=True):
            assert sequences.of(request).capacity >= len(request.tokens) + number
        assert sequences.num_held <= most
        check(sequences, requests)
        for request in requests:
            sequences.of(request).length = len(request.tokens) - 1
            mark(sequences, request)


def test_torch_running_out_of_memory_is_a_memory_error():
    with pytest.raises(MemoryError), as_memory_error():
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="size"), as_memory_error():
        torch.ones(2) @ torch.ones(3)


def test_a_text_that_there_is_no_memory_to_keep_is_released(monkeypatch):
    sequences = Sequences(Packed(), MAX_NODES, 100, 100)  # type: ignore[arg-type]
    request = Request(0, RequestParams([0] * 30, 2))
    sequences.reserve([request])
    sequences.of(request).length = 20

    def fails(text):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sequences, "_keep", fails)
    sequences.release(request)
    assert sequences.cache.num_held == 0


def test_a_step_that_does_not_fit_takes_no_slots_away():
    sequences = Sequences(Packed(), MAX_NODES, 30)  # type: ignore[arg-type]
    held, other = (Request(index, RequestParams([0] * 10, 40)) for index in range(2))
    sequences.reserve([held], [MAX_NODES])
    before = sequences.of(held).capacity
    with pytest.raises(MemoryError, match="KV slots"):
        sequences.reserve([held, other], [MAX_NODES, 30])
    assert sequences.of(held).capacity == before


def test_room_that_was_taken_back_is_given_again_to_who_needs_it_in_this_step():
    """Found by simulated faults, seed 385."""
    sequences = Sequences(Packed(), MAX_NODES, 17)  # type: ignore[arg-type]
    held = Request(0, RequestParams([0] * 5, 2))
    other = Request(1, RequestParams([0] * 6, 2))
    sequences.reserve([held], [0])
    sequences.reserve([held, other], [3, 0])  # held had room for its tree, until other needed some
    assert sequences.of(held).capacity >= len(held.tokens) + 3
    assert sequences.of(other).capacity >= len(other.tokens)
