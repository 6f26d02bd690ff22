"""Candidate trees of a block's predictions, against exact products and the target's noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hf_slospec.engine.acceptance import SHARPNESS
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.block_drafter import block_marginals, block_trees
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.model.test_coupling import VOCAB, KnownNoise, random_logits, requests_with
from tests.support.toys.trees import path_to


def greedy(count):
    return [Request(index, RequestParams([1, 2, 3 + index], 10)) for index in range(count)]


def test_trees_hold_the_most_probable_continuations():
    logits = random_logits(2, 3, VOCAB)
    trees = block_trees(greedy(2), logits, Plan(3, 4))
    for request, tree in enumerate(trees):
        tree.check()
        assert int(tree.tokens[0]) == 3 + request and tree.num_nodes == 1 + 3 * 4
        probs = logits[request].double().softmax(-1).numpy()
        of = {
            path: float(np.prod([probs[level, token] for level, token in enumerate(path)]))
            for depth in (1, 2, 3)
            for path in itertools.product(range(VOCAB), repeat=depth)
        }
        best = sorted(of, key=lambda path: -of[path])[:12]
        assert {tuple(path_to(tree, node)) for node in range(1, 13)} == set(best)
        np.testing.assert_allclose(
            tree.path_probs[1:], sorted((of[path] for path in best), reverse=True), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("plan", "depth", "num_nodes"), [(Plan(2, 1), 2, 2), (Plan(6, 1), 3, 6), (Plan(1, 99), 1, 7)]
)
def test_plans_bound_depth_and_nodes(plan, depth, num_nodes):
    logits = random_logits(1, 3, VOCAB)
    logits[..., 2] += 9.0  # a chain would be best
    (tree,) = block_trees(greedy(1), logits, plan)
    assert (tree.max_depth, tree.num_nodes) == (depth, 1 + num_nodes)


def test_rows_without_a_possible_token_end_their_trees():
    logits = random_logits(2, 3, VOCAB)
    logits[0, 1] = -torch.inf
    logits[1, 0, 1:] = -torch.inf
    first, second = block_trees(greedy(2), logits, Plan(3, 5))
    assert first.max_depth == 1 and first.num_nodes == 1 + VOCAB
    assert (second.depths == 1).sum() == 1 and second.path_probs[1] == 1.0
    second.check()


def test_positions_of_sampled_requests_are_ranked_by_their_noise():
    sampler = KnownNoise(3)
    requests = requests_with(sampler, 3)
    requests[1].noise = None
    logits = random_logits(3, 4, VOCAB)
    tokens, probs = block_marginals(requests, logits, 99)
    assert tokens.shape == probs.shape == (3, 4, VOCAB)
    for place, depth in itertools.product(range(3), range(4)):
        scores = logits[place, depth]
        if place != 1:
            scores = (scores - sampler.at(depth, place).log()) / SHARPNESS
        best = scores.softmax(-1).sort(descending=True)
        assert tokens[place, depth].tolist() == best.indices.tolist()
        np.testing.assert_allclose(probs[place, depth], best.values.numpy(), rtol=1e-5)


def test_processors_that_read_the_text_get_the_first_candidates():
    seen: list[list[int]] = []

    def forbid_repeats(input_ids, scores):
        seen.extend(input_ids.tolist())
        return scores.scatter(1, input_ids, -torch.inf)

    requests = requests_with(KnownNoise(1), 1, (forbid_repeats,), reads_text=True)
    tokens, _ = block_marginals(requests, random_logits(1, 3, VOCAB), 2)
    favourites = tokens[0, :, 0].tolist()
    assert seen == [[1, 2, 3, *favourites[:depth]] for depth in range(3)]
    assert len({1, 2, 3, *favourites}) == 6
