"""Kept texts are found by the tokens they begin with, as a search of all of them would find them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.model import sequences as rooms
from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.kept_prefixes import KeptPrefix, KeptPrefixes, num_common
from hf_slospec.model.sequences import Sequences
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.model.test_request_sequences import MAX_NODES, Packed
from tests.support.breadth import quick_or
from tests.support.packed import cached
from tests.support.toys.trees import SEEDS

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(texts=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), TEXTS), max_size=20), wanted=TEXTS)
@settings(deadline=None, max_examples=quick_or(100, 300))
def test_the_longest_common_beginning_is_found(texts, wanted):
    kept = KeptPrefixes()
    given_back = list[KeptPrefix]()
    added = [KeptPrefix(salt, tokens, CachedSequence()) for salt, tokens in texts]
    for text in added:
        given_back += kept.add(text)
    assert {*kept.by_age(), *given_back} == {*added} and len(kept) + len(given_back) == len(added)
    assert kept.num_tokens == sum(len(text.tokens) for text in kept.by_age())
    for text in kept.by_age():  # none is the beginning of another one
        others = [other for other in kept.by_age() if other is not text and other.salt == text.salt]
        assert not any(other.tokens[: len(text.tokens)] == text.tokens for other in others)
    for salt in ("", "a", "b"):
        lengths = [num_common(tokens, wanted) for own, tokens in texts if own == salt]
        found, length = kept.longest(wanted, salt)
        assert length == max(lengths, default=0)
        assert found is None or found.tokens[:length] == wanted[:length]


@given(some=TEXTS, others=TEXTS)
def test_common_tokens_are_counted(some, others):
    expected = 0
    while expected < min(len(some), len(others)) and some[expected] == others[expected]:
        expected += 1
    assert num_common(some, others) == expected


def test_texts_are_in_the_order_of_their_last_use():
    kept, texts = (
        KeptPrefixes(),
        [KeptPrefix("", [index, 1], CachedSequence()) for index in range(3)],
    )
    for text in texts:
        kept.add(text)
    kept.touch(texts[0])
    assert kept.by_age() == [texts[1], texts[2], texts[0]]
    assert kept.add(KeptPrefix("", [1], CachedSequence()))[0].tokens == [
        1
    ]  # it says no more than one that is kept
    assert kept.by_age() == [texts[2], texts[0], texts[1]]


class Text:
    """Requests of one engine whose K/V says which text, salt and weights it was computed from."""

    def __init__(self, max_slots, max_kept):
        self.packed = Packed()
        self.sequences = Sequences(self.packed, MAX_NODES, max_slots, max_kept)  # type: ignore[arg-type]

    def right(self, request, length):
        state = self.packed.version.weights, request.params.cache_salt
        return [float(hash((state, *request.tokens[: end + 1])) % 2**20) for end in range(length)]

    def compute(self, request):
        """Cache the K/V of all tokens but the last one."""
        own = self.sequences.of(request)
        slots = self.sequences.cache.pool.keys[0][own.start : own.start + own.capacity, 0, 0]
        length = len(request.tokens) - 1
        slots[own.length : length] = torch.tensor(self.right(request, length)[own.length :])
        slots[length:] = -1.0
        own.length = length

    def check(self, requests):
        self.sequences.check(requests)
        for request in requests:
            (key, _), *_ = cached(self.sequences.cache, self.sequences.of(request))
            assert key.flatten().tolist() == self.right(request, len(key.flatten()))


@given(
    seed=SEEDS,
    max_slots=st.sampled_from([None, 60, 90]),
    max_kept=st.sampled_from([None, 0, 20, float("inf")]),
    room=st.integers(1, 9),
)
@settings(deadline=None, max_examples=quick_or(50, 150))
def test_reused_tokens_have_the_k_v_of_their_own_text(seed, max_slots, max_kept, room):
    rng = np.random.default_rng(seed)
    served = Text(max_slots, max_kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "FIRST_ROOM", room)
        patch.setattr(rooms, "MIN_SHARED", 2)
        requests = list[Request]()
        num_reused = 0
        for index in range(50):
            tokens = rng.integers(0, 2, int(rng.integers(2, 14))).tolist()
            new = Request(
                index,
                RequestParams(
                    tokens,
                    int(rng.integers(1, 14)),
                    cache_salt=str(rng.choice(["", "a"], p=[0.8, 0.2])),
                ),
            )
            longest = [
                each.prompt_len + each.params.max_new_tokens + MAX_NODES
                for each in (*requests, new)
            ]
            if max_slots is None or sum(longest) <= max_slots:
                expected = served.sequences.num_reusable(new)
                num_cached = served.sequences.reuse(new)
                assert num_cached in (0, expected) and num_cached < len(tokens)
                assert max_kept is not None or not num_cached
                num_reused += num_cached > 0
                requests.append(new)
            served.sequences.reserve(requests)
            served.check(requests)
            for request in requests:
                longest_text = request.prompt_len + request.params.max_new_tokens + MAX_NODES
                capacity = served.sequences.of(request).capacity
                assert len(request.tokens) + MAX_NODES <= capacity <= longest_text
            for request in list(requests):
                served.compute(request)
                if rng.random() < 0.3:
                    requests.remove(request)
                    served.sequences.release(request)
                    assert served.sequences.num_kept <= (max_kept or 0)
                elif request.num_left:
                    request.tokens.append(int(rng.integers(2)))
            if rng.random() < 0.05:  # what was computed before is no longer right
                for request in requests:
                    served.sequences.of(request).length = 0
                    served.sequences.release(request)
                requests = []
                served.packed.version.weights += 1
            served.check(requests)
            assert max_slots is None or served.sequences.cache.pool.num_slots <= max_slots
        served.sequences.close()
        assert not served.packed.kv_cache.num_held
    assert num_reused or (max_kept or 0) <= 20


def request_of(*tokens, index=0):
    return Request(index, RequestParams(list(tokens), 4))


def finished(served, request):
    served.sequences.reserve([request])
    served.compute(request)
    served.sequences.release(request)


def test_a_conversation_goes_on_in_the_same_place_and_other_texts_are_copied(monkeypatch):
    monkeypatch.setattr(rooms, "MIN_SHARED", 2)
    served = Text(None, float("inf"))
    finished(served, request_of(1, 2, 3, 4, 5))
    next_turn = request_of(1, 2, 3, 4, 5, 6, index=1)
    other = request_of(1, 2, 9, index=2)
    assert served.sequences.num_kept == 4
    assert served.sequences.reuse(other) == 2 and served.sequences.num_kept == 4
    assert served.sequences.reuse(next_turn) == 4 and served.sequences.num_kept == 0
    served.check([other, next_turn])
    third = request_of(1, 2, 3, 7, index=3)
    assert served.sequences.reuse(third) == 3  # from a request that goes on
    served.check([other, next_turn, third])


def test_a_text_is_taken_over_where_there_is_no_room_for_two(monkeypatch):
    monkeypatch.setattr(rooms, "MIN_SHARED", 2)
    served = Text(16, float("inf"))
    finished(served, request_of(*range(9)))
    request = request_of(0, 1, 2, 3, 99)
    assert served.sequences.reuse(request) == 4
    served.sequences.reserve([request])
    assert served.sequences.num_kept == 0
    served.check([request])


def test_requests_get_the_room_of_kept_texts(monkeypatch):
    monkeypatch.setattr(rooms, "MIN_SHARED", 2)
    served = Text(30, float("inf"))
    finished(served, request_of(*range(10)))
    finished(served, request_of(*range(20, 30), index=1))
    assert served.sequences.num_kept == 18
    large = request_of(*range(40, 50), index=2)  # needs 17 slots
    served.sequences.reserve([large])
    assert served.sequences.num_kept == 9  # the oldest one is gone
    assert served.sequences.num_reusable(request_of(20, 21, 22, 5, index=3)) == 3
    assert served.sequences.num_reusable(request_of(0, 1, 2, 5, index=4)) == 0
    assert served.sequences.num_reusable(large) == 0


def test_failed_requests_and_prompts_of_embeddings_are_not_kept(monkeypatch):
    monkeypatch.setattr(rooms, "MIN_SHARED", 2)
    served = Text(None, float("inf"))
    failed = request_of(1, 2, 3, 4)
    embedded = request_of(1, 2, 3, 4, index=1)
    failed.error = ValueError("of its own")
    finished(served, failed)
    served.sequences.reserve([embedded])
    served.sequences.of(embedded).embeds = torch.zeros(4, 1)
    served.compute(embedded)
    assert served.sequences.num_reusable(request_of(1, 2, 3, 9, index=2)) == 0
    served.sequences.release(embedded)
    assert not served.sequences.num_kept and not served.packed.kv_cache.num_held


def test_requests_that_wait_for_prefill_follow_one_that_is_prefilled(monkeypatch):
    monkeypatch.setattr(rooms, "MIN_SHARED", 2)
    served = Text(None, float("inf"))
    first = request_of(*range(20))
    second = request_of(*range(20), index=1)
    served.sequences.reserve([first])
    for length in (6, 12, 19):  # as chunks of its prompt are processed
        served.compute(first)
        served.sequences.of(first).length = length
        assert served.sequences.reuse(second) == length
        served.sequences.of(second).length = length
        served.check([first, second])
