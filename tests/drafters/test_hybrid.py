"""Several drafters at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.drafters import hybrid
from hf_slospec.drafters.hybrid import HybridDrafter
from hf_slospec.drafters.lookup import PromptLookupDrafter
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import ROOT, TokenTree
from tests.support.toys.trees import SEEDS, UNEVEN


class Scripted(Drafter):
    """Drafts by a function of the text; counts its calls."""

    def __init__(self, guess, conditional=0.5):
        self.guess = guess
        self.conditional = conditional
        self.asked: list[int] = []
        self.released: list[int] = []
        self.closed = 0

    def draft(self, requests, plan):
        self.asked += [request.index for request in requests]
        return [
            TokenTree.chain(
                request.tokens[-1], self.guess(request.tokens)[: plan.depth], self.conditional
            )
            for request in requests
        ]

    def release(self, request):
        self.released.append(request.index)

    def reuse(self, request):
        return 3

    def close(self):
        self.closed += 1


def right(tokens):
    return [(tokens[-1] + step) % 50 for step in range(1, 9)]


def wrong(tokens):
    return [77] * 8


def request_of(index):
    """A request whose text begins with its index."""
    return Request(index, RequestParams([index], 10**6))


def step(drafter, requests, plan):
    """Verify what is drafted against the text that goes on by 1 (modulo 50); return the number of
    new tokens.
    """
    num_tokens = 0
    for request, tree in zip(requests, drafter.draft(requests, plan), strict=True):
        tree.check()
        assert tree.tokens[ROOT] == request.tokens[-1]
        assert tree.max_depth <= plan.depth and tree.num_nodes - 1 <= plan.depth * plan.width
        node: int | None = ROOT
        while node is not None:
            token = (request.tokens[-1] + 1) % 50
            request.emit(token)
            node = tree.child(node, token)
            num_tokens = num_tokens + 1
    return num_tokens


def test_parts_that_complement_each_other_are_merged():
    def at(rest):
        return Scripted(lambda tokens: right(tokens) if tokens[-1] % 2 == rest else wrong(tokens))

    parts = [at(0), at(1), Scripted(wrong)]
    drafter = HybridDrafter(parts)
    request = request_of(0)
    for _ in range(8):
        assert step(drafter, [request], Plan(2, 2)) == 3
    assert [len(part.asked) for part in parts] == [8, 8, 8]


@given(seed=SEEDS, num_parts=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_requests_that_come_pause_and_leave(seed, num_parts):
    """Trees are valid, the first part is asked for all requests, and later ones for no others."""
    rng = np.random.default_rng(seed)
    plan = Plan(4, 2)

    def guess(tokens):
        return right(tokens)[: int(rng.integers(0, 5))] + [77] * int(rng.integers(0, 3))

    parts = [Scripted(guess, conditional) for conditional in rng.choice(UNEVEN, num_parts)]
    drafter = HybridDrafter(parts)
    requests = [request_of(0)]
    for number in range(20):
        if rng.random() < 0.2:
            requests.append(request_of(number + 1))
        if rng.random() < 0.2 and len(requests) > 1:
            drafter.release(requests[0])  # finished, or preempted
            requests = requests[1:] + requests[: int(rng.integers(2))]
        for part in parts:
            part.asked.clear()
        drafting = [request for request in requests if rng.random() < 0.8] or requests[:1]
        step(drafter, drafting, plan)
        assert parts[0].asked == [request.index for request in drafting]
        assert all(set(part.asked) <= set(parts[0].asked) for part in parts)


def test_a_tree_that_only_one_part_proposes_is_not_merged(monkeypatch):
    def merged(*_):
        raise AssertionError("trees were merged")

    monkeypatch.setattr(hybrid, "merge_trees", merged)
    drafter = HybridDrafter((PromptLookupDrafter(), Scripted(right)))
    assert step(drafter, [request_of(0)], Plan(4, 2)) == 5
    assert step(HybridDrafter([PromptLookupDrafter()]), [request_of(0)], Plan(4, 2)) == 1


@pytest.mark.parametrize(("conditional", "is_asked"), [(0.9, False), (0.5, True)])
def test_model_is_not_asked_where_the_cheap_part_is_confident(conditional, is_asked):
    model = Scripted(right)
    step(HybridDrafter([Scripted(right, conditional), model]), [request_of(0)], Plan(4, 1))
    assert bool(model.asked) is is_asked


def test_release_reuse_and_close_are_passed_on():
    parts = [Scripted(right), Scripted(wrong)]
    drafter: Drafter = HybridDrafter([PromptLookupDrafter(), *parts])
    request = Request(5, RequestParams([1, 2], 10))
    assert isinstance(drafter, HybridDrafter) and drafter.reuse(request) == 3
    drafter.draft([request], Plan(2, 2))
    drafter.release(request)
    drafter.close()
    assert all(part.released == [5] and part.closed == 1 for part in parts)
