"""Drafting from the request's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_slospec.drafters.lookup import TRUST, PromptLookupDrafter, continuations
from hf_slospec.engine.interfaces import Plan
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request


def draft(tokens, depth, width):
    """The candidate tree as (path of tokens, path probability), in order of nodes."""
    [tree] = PromptLookupDrafter().draft(
        [Request(0, RequestParams(tokens, 10))], Plan(depth, width)
    )
    tree.check()
    paths: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
    return [(path, float(prob)) for path, prob in zip(paths[1:], tree.path_probs[1:], strict=True)]


def test_longest_ngram_wins_and_latest_match_comes_first():
    assert continuations(np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 2) == [[9, 2]]
    assert continuations(np.array([5, 3, 9, 3, 8, 4, 3]), 2) == [[8, 4], [9, 3]]
    assert continuations(np.array([5, 5, 5]), 4) == [[5]]
    assert continuations(np.array([1, 2, 3]), 2) == []
    assert continuations(np.array([1]), 2) == []


def test_several_matches_become_branches():
    tokens = [7, 3, 9, 4, 7, 3, 8, 4, 7, 3, 9, 5, 7, 3]
    assert draft(tokens, 2, 4) == [
        ([9], pytest.approx(TRUST * 2 / 3)),
        ([8], pytest.approx(TRUST / 3)),
        ([9, 5], pytest.approx(TRUST**2 / 3)),
        ([9, 4], pytest.approx(TRUST**2 / 3)),
        ([8, 4], pytest.approx(TRUST**2 / 3)),
    ]
    assert [path for path, _ in draft(tokens, 2, 1)] == [[9], [9, 5]]


def test_nothing_found_is_a_root_alone():
    assert draft([1, 2, 3], 4, 4) == []


class KnownNoise:
    def __init__(self, noise):
        self.noise = noise

    def after(self, depth, tokens=None):
        return self.noise[depth] if tokens is None else self.noise[depth][tokens]


def test_noise_tells_which_proposals_will_be_drawn():
    """A token of probability TRUST is drawn by noise q with the frequency that the draft says once
    it knows q.
    """
    proposed = 5
    count = 4000
    probs = torch.full((8,), (1 - TRUST) / 7)
    probs[proposed] = TRUST
    said = np.empty(count)
    drawn = np.empty(count, dtype=bool)
    params = RequestParams([1, 2, proposed, 1, 2], 10, is_sampled=True)
    for index, noise in enumerate(
        torch.empty(count, 1, 8).exponential_(1, generator=torch.Generator().manual_seed(0))
    ):
        request = Request(index, params, new_noise=lambda _, noise=noise: KnownNoise(noise))
        [tree] = PromptLookupDrafter().draft([request], Plan(1, 1))
        said[index], drawn[index] = tree.path_probs[1], int((probs / noise[0]).argmax()) == proposed
    assert drawn.mean() == pytest.approx(TRUST, abs=0.03)
    for low in np.arange(0.0, 1.0, 0.2):
        here = (said >= low) & (said < low + 0.2)
        error = (0.25 / max(here.sum(), 1)) ** 0.5
        assert not here.any() or drawn[here].mean() == pytest.approx(
            said[here].mean(), abs=4 * error
        )
    assert (said < 0.3).any() and (said > 0.9).any()


def test_noise_orders_branches():
    noise = torch.ones(2, 10)
    noise[0, 9], noise[0, 8] = 5.0, 0.01
    params = RequestParams([7, 3, 9, 4, 7, 3, 8, 4, 7, 3, 9, 5, 7, 3], 10, is_sampled=True)
    request = Request(0, params, new_noise=lambda _: KnownNoise(noise))
    [tree] = PromptLookupDrafter().draft([request], Plan(2, 4))
    tree.check()
    assert tree.tokens[1:3].tolist() == [8, 9]
