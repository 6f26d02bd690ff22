"""One K/V cache per model: engines share its pool, survive each other's growth, and leave nothing
behind.
"""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model import kv_cache
from hf_slospec.model import sequences as room
from hf_slospec.model.batch import CachedSequence, LayerShape
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.tree_mask import chain
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import quick_or
from tests.support.packed import cached
from tests.support.served_pair import WAIT_S, Holds
from tests.support.toys.tiny_models import ragged_prompts, tiny_model
from tests.support.toys.trees import SEEDS, stored

LAYOUT = [LayerShape(stored(1, 2), stored(1, 3))]
GREEDY: dict[str, Any] = dict(do_sample=False)


def new_pool(num_slots):
    return KVPool(LAYOUT, num_slots)


def write(cache, sequence, marker):
    """Cache as many tokens as fit, all with the same values."""
    sequence.length = sequence.capacity
    cache.write(
        sequence,
        [
            (
                torch.full((1, sequence.length, 2), marker),
                torch.full((1, sequence.length, 3), -marker),
            )
        ],
        sequence.length,
    )


def check(cache, written):
    cache.pool.check()
    assert set(cache.pool.sequences) == set(written)
    assert cache.num_held == sum(sequence.capacity for sequence in written)
    for sequence, (marker, length) in written.items():
        ((key, value),) = cached(cache, sequence)
        assert key.shape == (1, length, 2) and value.shape == (1, length, 3)
        assert (key == marker).all() and (value == -marker).all()


def fails_to_allocate(num_slots):
    raise torch.OutOfMemoryError("of the test")


@given(seed=SEEDS, has_limit=st.booleans())
@settings(deadline=None, max_examples=quick_or(33, 100))
def test_sequences_keep_their_values_while_others_come_grow_and_go(seed, has_limit):
    rng = np.random.default_rng(seed)
    limit = 40 if has_limit else None
    cache = KVCache(new_pool, new_pool(0))
    written = dict[CachedSequence, tuple[float, int]]()
    for marker in range(1, 40):
        if written and rng.random() < 0.4:
            gone = list(written)[rng.integers(len(written))]
            del written[gone]
            if rng.random() < 0.5:
                cache.release(gone)
                assert (gone.start, gone.capacity, gone.length) == (0, 0, 0)
            del gone  # its slots are free without a release as well
        more = {
            one: one.capacity + int(rng.integers(0, 5)) for one in written if rng.random() < 0.3
        }
        new = CachedSequence()
        before = cache.pool.num_slots
        cache.reserve(more | {new: int(rng.integers(1, 9))}, limit)
        assert all(one.capacity >= capacity for one, capacity in more.items())
        if limit is not None and cache.pool.num_slots > before:
            assert cache.pool.num_slots <= max(limit, cache.num_held)
        write(cache, new, float(marker))
        written[new] = float(marker), new.length
        check(cache, written)


def test_without_memory_for_a_larger_pool_nothing_changes(monkeypatch):
    cache = KVCache(new_pool, new_pool(0))
    held = CachedSequence()
    new = CachedSequence()
    cache.reserve({held: 5})
    write(cache, held, 7.0)
    pool = cache.pool

    def exhausted(*_):
        raise MemoryError

    for name in ("__init__", "take_over"):
        with monkeypatch.context() as short:
            short.setattr(KVPool, name, exhausted)
            with pytest.raises(MemoryError):
                cache.reserve({held: 9, new: 4})
        assert cache.pool is pool and (new.start, new.capacity) == (0, 0)
        check(cache, {held: (7.0, 5)})


def test_growing_frees_each_tensor_before_the_next_one(monkeypatch):
    cache = KVCache(new_pool, new_pool(0))
    held = [CachedSequence() for _ in range(3)]
    cache.reserve(dict.fromkeys(held, 5))
    for marker, sequence in enumerate(held):
        write(cache, sequence, float(marker))
    old = [weakref.ref(stack) for stack in cache.pool._stacks.values()]
    alive = list[int]()
    zeros = kv_cache._zeros

    def counted(number, num_rows, kind):
        if num_rows:
            alive.append(sum(one() is not None for one in old))
        return zeros(number, num_rows, kind)

    monkeypatch.setattr(kv_cache, "_zeros", counted)
    cache.reserve(dict.fromkeys(held, 9))
    assert alive == [*range(len(old), 0, -1)] and len(old) > 1
    check(cache, {sequence: (float(marker), 5) for marker, sequence in enumerate(held)})


def test_a_pool_of_layers_with_states_alone_grows():
    cache = KVCache(lambda num_slots: KVPool([], num_slots), KVPool([], 0))
    first, second = CachedSequence(), CachedSequence()
    cache.reserve({first: 5})
    cache.reserve({second: 6})
    cache.pool.check()
    assert (cache.pool.num_slots, cache.num_held) == (11, 11)


def test_without_memory_for_the_last_tensor_sequences_stay_where_they_are(monkeypatch):
    cache = KVCache(new_pool, new_pool(0))
    held = [CachedSequence() for _ in range(3)]
    new = CachedSequence()
    cache.reserve(dict.fromkeys(held, 5))
    for marker, sequence in enumerate(held):
        write(cache, sequence, float(marker))
    pool = cache.pool
    calls = list[int]()
    zeros = kv_cache._zeros

    def exhausted(number, num_rows, kind):
        if num_rows:
            calls.append(num_rows)
        if len(calls) == len(pool._stacks):
            raise torch.OutOfMemoryError("of the test")
        return zeros(number, num_rows, kind)

    values = {sequence: (float(marker), 5) for marker, sequence in enumerate(held)}
    with monkeypatch.context() as short:
        short.setattr(kv_cache, "_zeros", exhausted)
        with pytest.raises(MemoryError):
            cache.reserve({held[0]: 9, new: 4})
    assert cache.pool is not pool  # graphs have the addresses of the one before
    assert (cache.pool.num_slots, cache.num_held, new.capacity) == (15, 15, 0)
    check(cache, values)
    cache.reserve({held[0]: 9, new: 4})
    write(cache, new, 7.0)
    check(cache, values | {new: (7.0, new.length)})


# ---- one cache for all users of a model


@pytest.fixture
def packed():
    return PackedModel(tiny_model("llama"))


def continued(sequences, request, num_tokens):
    """Decode greedily, a token a step."""
    for _ in range(num_tokens):
        sequences.reserve([request])
        part = chain(sequences.packed, sequences.of(request), sequences.uncached(request))
        logits = sequences.forward([part], torch.tensor([len(part.input_ids) - 1])).logits
        sequences.of(request).length = len(request.tokens)
        request.tokens.append(int(logits[0].argmax()))


def test_two_engines_survive_each_others_growth_and_repacking(packed, monkeypatch):
    monkeypatch.setattr(room, "FIRST_ROOM", 3)
    prompts = [[5, 6, 7, 8], [9, 3, 4], [11, 12, 13, 14, 15]]
    expected = [stock(prompt, 40) for prompt in prompts]
    ours = Sequences(packed, 1)
    theirs = Sequences(packed, 1, max_slots=60)
    requests = [
        Request(index, RequestParams(list(prompt), 40)) for index, prompt in enumerate(prompts)
    ]
    first, passing, second = requests
    pools = set[KVPool]()
    starts = set[int]()
    for step in range(40):
        continued(ours, first, 1)
        continued(theirs, second, 1)
        if 5 <= step < 25:
            continued(ours, passing, 2)
        elif step == 25:
            ours.release(passing)
        assert ours.cache is theirs.cache is packed.kv_cache
        ours.check([first, passing])
        theirs.check([second])
        pools.add(ours.cache.pool)
        starts.add(theirs.of(second).start)
    assert len(pools) > 2 and len(starts) > 2
    for request, right in zip(requests, expected, strict=True):
        new = request.tokens[request.prompt_len :]  # stock ends at an end-of-text token
        assert new[: len(right)] == right and len(right) > 15
    with pytest.raises(MemoryError, match="60"):
        theirs.reserve_for(second, 61)


def test_storage_is_freed_after_its_last_user(packed):
    ours = Sequences(packed, 1)
    theirs = Sequences(packed, 1)
    for sequences in (ours, theirs):
        sequences.reserve([Request(0, RequestParams([1, 2, 3], 5))])
    ours.close()
    assert packed.kv_bytes and packed.kv_cache.num_held == 3 + 5 + 1
    theirs.close()
    assert not packed.kv_bytes
    theirs.close()  # again, and used again after that
    theirs.reserve([Request(0, RequestParams([1, 2, 3], 5))])
    assert packed.kv_bytes
    theirs.close()
    assert not packed.kv_bytes


@pytest.fixture
def interrupts():
    """Raise KeyboardInterrupt on SIGINT, which a run in the background of a shell ignores."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_waits_for_a_move_of_sequences(packed, monkeypatch):
    users = [Sequences(packed, 1) for _ in range(2)]
    requests = [Request(i, RequestParams([5 + i, 6, 7], 30)) for i in range(2)]
    for user, request in zip(users, requests, strict=True):
        continued(user, request, 4)
    shift = KVPool.take_over
    shifted = list[KVPool]()

    def interrupted(pool, *arguments):
        signal.raise_signal(signal.SIGINT)
        shift(pool, *arguments)
        shifted.append(pool)

    monkeypatch.setattr(KVPool, "take_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        users[0].reserve_for(requests[0], 5000)
    assert shifted and users[0].cache.pool is shifted[0]
    monkeypatch.undo()
    for user, request in zip(users, requests, strict=True):
        continued(user, request, 4)
        assert request.tokens[3:] == stock(request.tokens[:3], 8)


def test_measuring_leaves_others_alone_and_nothing_behind(packed):
    user = Sequences(packed, 1)
    request = Request(0, RequestParams([5, 6, 7, 8], 40))
    continued(user, request, 6)
    before = user.cache.num_held
    assert Forwards(packed)(Size(24, 3, 500)) > 0.0  # a larger pool
    assert user.cache.num_held == before
    continued(user, request, 6)
    assert request.tokens[4:] == stock([5, 6, 7, 8], 12)
    user.close()
    assert not packed.kv_bytes


def test_a_user_that_is_garbage_collected_leaves_nothing(packed):
    def user(is_cyclic):
        sequences = Sequences(packed, 1)
        sequences.reserve([Request(0, RequestParams([1, 2, 3], 5))])
        if is_cyclic:
            sequences.itself = sequences  # type: ignore[attr-defined]
        return sequences

    kept = user(False)
    user(False)
    user(True)
    gc.collect()
    assert packed.kv_cache.num_held == kept.of(next(iter(kept._by_request))).capacity
    del kept
    assert not packed.kv_bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_begins_with_an_empty_cache(packed):
    sequences = Sequences(packed, 1)
    sequences.reserve([Request(0, RequestParams([1, 2, 3], 5))])
    if not (pid := os.fork()):
        is_empty = packed.kv_cache is not sequences.cache and not packed.kv_cache.num_held
        os._exit(0 if is_empty else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert packed.kv_cache is sequences.cache


# ---- whole engines


@pytest.fixture(scope="module")
def generator():
    config = SLOSpecConfig(
        policy="fixed", max_depth=3, max_width=2, max_batch=3, check_invariants=True
    )
    return SLOSpecGenerator(tiny_model("llama"), tiny_model("llama", noise=0.03), config=config)


def kv_bytes(generator):
    return sum(model.kv_bytes for model in generator.decoder.speculator.models)


def stock(prompt, num_tokens):
    row = torch.tensor([prompt])
    out = tiny_model("llama").generate(
        row, attention_mask=torch.ones_like(row), **GREEDY, max_new_tokens=num_tokens
    )
    return out[0, len(prompt) :].tolist()


def test_engines_that_die_leave_nothing(generator):
    def broken(input_ids, scores):
        if input_ids.shape[1] > 40:
            raise ValueError("broken")
        return scores

    with pytest.raises(ValueError, match="broken") as caught:
        generator.generate(
            **ragged_prompts(1), **GREEDY, max_new_tokens=60, logits_processor=[broken]
        )
    assert not kv_bytes(generator) and caught.value.__traceback__ is not None
    for dies_in in ("draft", "verify"):

        def dies(*_):
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch, generator, Holds() as holds:
            handle = generator.submit(
                [5, 6, 7], max_new_tokens=60, **GREEDY, stopping_criteria=[holds]
            )
            assert holds.is_reached.wait(WAIT_S)
            owner = (
                "drafters.assistant.AssistantDrafter.draft"
                if dies_in == "draft"
                else "model.target.PackedTarget.verify"
            )
            patch.setattr(f"hf_slospec.{owner}", dies)
            holds.may_go.set()
            with pytest.raises(ZeroDivisionError):
                handle.result(60)
    gc.collect()
    assert not kv_bytes(generator)
    assert generator.generate(torch.tensor([[5, 6, 7]]), **GREEDY, max_new_tokens=20)[
        0, 3:
    ].tolist() == stock([5, 6, 7], 20)
