"""Ranges of KV slots that grow, move and are given back, and never lose what they hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hf_slospec.model.batch import LayerShape, Stored
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.sequences import Sequences
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import quick_or
from tests.support.packed import cached
from tests.support.toys.trees import SEEDS

MAX_NODES = 3
SHAPE = LayerShape(*[Stored(1, 1, torch.float32, torch.device("cpu"))] * 2)


class Packed:
    """As much of a packed model as storage asks for."""

    def __init__(self):
        self.version = SimpleNamespace(weights=0, notice=lambda structure=True: None)
        self.family = SimpleNamespace(has_states=False)
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
@settings(deadline=None, max_examples=quick_or(33, 100))
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
