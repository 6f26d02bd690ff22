"""Drafting from suffix trees."""

from __future__ import annotations

import gc
import random
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec import MissingExtraError, PastAnswers
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.suffix import SuffixDrafter
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.toys.noise import KnownNoise
from tests.support.toys.trees import path_to

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def tree_tokens(drafter):
    """Return the number of tokens in the suffix trees of requests."""
    return sum(tree.num_tokens for tree in drafter._trees.values())


def draft(drafter, request, depth=4, width=4):
    [tree] = drafter.draft([request], Plan(depth, width))
    tree.check()
    assert tree.tokens[0] == request.tokens[-1]
    assert tree.max_depth <= depth and tree.num_nodes - 1 <= depth * width
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)
    return tree


def paths_of(tree):
    return [tuple(path_to(tree, node)) for node in range(1, tree.num_nodes)]


def extended(request, tokens):
    for token in tokens:
        request.emit(token)
    return request


def occurs(path, text):
    return any(
        list(text[at : at + len(path)]) == list(path) for at in range(len(text) - len(path) + 1)
    )


@given(text=TEXTS, steps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4))
@settings(deadline=None)
def test_proposals_followed_the_last_token_before(text, steps):
    """Incremental drafting proposes what naive matching finds, and the same as drafting anew does."""
    drafter = SuffixDrafter()
    request = Request(0, RequestParams(text, 1000))
    for tokens in [[], *steps]:
        extended(request, tokens)
        tree = draft(drafter, request)
        assert all(occurs([request.tokens[-1], *path], request.tokens) for path in paths_of(tree))
        anew = draft(SuffixDrafter(), Request(0, RequestParams(list(request.tokens), 1000)))
        assert paths_of(tree) == paths_of(anew)
        assert tree.path_probs.tolist() == pytest.approx(anew.path_probs.tolist())
        if len(request.tokens) > 1 and request.tokens[-1] in request.tokens[:-1]:
            assert tree.num_nodes > 1


def test_share_and_length_of_matches_count():
    tree = draft(
        SuffixDrafter(), Request(0, RequestParams([7, 3, 1, 7, 3, 1, 7, 4, 1, 7], 100)), 1, 4
    )
    assert tree.tokens[1:].tolist() == [3, 4]
    short = draft(SuffixDrafter(), Request(0, RequestParams([5, 6, 1, 2, 6], 100)), 1, 1)
    long = draft(SuffixDrafter(), Request(0, RequestParams([5, 6, 1, 2, 5, 6], 100)), 1, 1)
    assert long.path_probs[1] > short.path_probs[1]


def test_salts_separate_texts():
    """No token of another salt is proposed, in random runs with releases."""
    rng = random.Random(0)
    drafter = SuffixDrafter(PastAnswers(max_tokens=200))
    requests: list[Request] = []
    for index in range(300):
        salt = rng.randrange(3)
        own = range(10 * salt + 10, 10 * salt + 14)
        if len(requests) > 5:
            drafter.release(requests.pop(rng.randrange(len(requests))))
        request = Request(
            index,
            RequestParams([rng.choice(own) for _ in range(3)], 1000, cache_salt=f"tenant {salt}"),
        )
        requests.append(request)
        for each in requests:
            low = int(each.params.cache_salt[-1]) * 10 + 10
            tree = draft(drafter, extended(each, [rng.randrange(low, low + 4) for _ in range(2)]))
            assert all(low <= token < low + 4 for token in tree.tokens)
        assert drafter.past is not None and drafter.past.num_tokens <= 200
        assert tree_tokens(drafter) <= sum(len(each.tokens) for each in requests)


def test_outputs_of_failed_requests_are_dropped():
    drafter = SuffixDrafter(PastAnswers())
    request = Request(0, RequestParams([1], 100))
    draft(drafter, extended(request, [5, 6, 7]))
    request.end(ValueError())
    drafter.release(request)
    assert drafter.past is not None and len(drafter.past) == drafter.past.num_tokens == 0


@pytest.mark.parametrize("shares_texts", [False, True])
def test_requests_seen_again_and_rolled_back(shares_texts):
    past = PastAnswers() if shares_texts else None
    drafter = SuffixDrafter(past)
    request = Request(0, RequestParams([1, 2, 3, 1, 2], 100))
    expected = [
        draft(SuffixDrafter(), Request(0, RequestParams([1, 2, 3, 1, 2, *[3, 1][:n]], 100)))
        for n in range(3)
    ]
    for emitted in (0, 1, 2):
        extended(request, [3, 1][emitted - 1 : emitted] if emitted else [])
        draft(drafter, request)
    drafter.release(request)  # preempted
    drafter.release(request)
    assert paths_of(draft(drafter, request)) == paths_of(expected[2])
    assert tree_tokens(drafter) == 7 and (past is None or (len(past), past.num_tokens) == (1, 2))
    del request.tokens[-1:]
    assert paths_of(draft(drafter, request)) == paths_of(expected[1])
    extended(request, [4])
    draft(drafter, request)
    assert tree_tokens(drafter) == 7 and (past is None or (len(past), past.num_tokens) == (1, 2))


def test_requests_are_not_kept_alive():
    drafter = SuffixDrafter()
    request = Request(0, RequestParams([1, 2, 1], 100))
    draft(drafter, request)
    drafter.release(Request(1, RequestParams([1], 100)))  # unknown
    del request
    gc.collect()
    assert tree_tokens(drafter) == 0


def test_threads():
    drafter = SuffixDrafter(PastAnswers(max_tokens=30))
    errors = list[BaseException]()

    def run(index):
        rng = random.Random(index)
        try:
            for number in range(20):
                request = Request(number, RequestParams([rng.randrange(3)], 100))
                for _ in range(10):
                    draft(drafter, extended(request, [rng.randrange(3)]))
                drafter.release(request)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert drafter.past is not None and drafter.past.num_tokens <= 30


def test_noise_orders_branches():
    request = Request(
        0,
        RequestParams([7, 3, 1, 7, 3, 1, 7, 4, 1, 7], 100, is_sampled=True),
        new_noise=lambda _: KnownNoise(),
    )
    assert draft(SuffixDrafter(), request, 1, 4).tokens[1:].tolist() == [4, 3]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    with pytest.raises(
        MissingExtraError, match=r"the drafter suffix needs arctic_inference; .*\[suffix\]"
    ):
        SuffixDrafter()
