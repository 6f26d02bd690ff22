"""Ranking of the draft's tokens by the target's noise, against exact probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from hf_slospec.engine.acceptance import SHARPNESS
from hf_slospec.model.coupling import Coupling, coupled
from hf_slospec.model.noise import GeneratorNoise
from hf_slospec.model.record import Record
from hf_slospec.model.sampling import StockSampler
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request

VOCAB = 7


class KnownNoise:
    """In place of a sampler: every request is a row of the noise."""

    def __init__(self, num_rows, vocab=VOCAB, seed=3):
        self.noise = GeneratorNoise(num_rows, torch.empty(1, vocab), seed)

    def noise_after(self, requests, depth, tokens=None):
        places = [(request.num_emitted + depth, request.index) for request in requests]
        return torch.stack(self.noise.rows(places))

    def at(self, position, row):
        return self.noise.rows([(position, row)])[0]

    def input_ids(self, request, tokens):
        return torch.tensor([tokens])


def requests_with(sampler, count, processors=(), reads_text=False):
    params = RequestParams([1, 2, 3], 10, is_sampled=True)
    return [
        Request(i, params, new_noise=lambda r: Coupling(sampler, r, processors, reads_text))
        for i in range(count)
    ]


def no_paths(place):
    raise AssertionError("no processor reads the text")


def random_logits(*shape, seed=0):
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_first_child_matches_as_often_as_theory_says(seed):
    """P(match) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV)."""
    count = 20_000
    target, draft = random_logits(2, VOCAB, seed=seed).softmax(-1)
    sampler = KnownNoise(count, seed=seed)
    ranked = coupled(requests_with(sampler, count), 0, draft.log().expand(count, 1, -1), no_paths)
    noise = torch.stack(sampler.noise.rows([(0, row) for row in range(count)]))
    chosen = (target / noise).argmax(-1)
    rate = float((ranked[:, 0].argmax(-1) == chosen).double().mean())
    ratios = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])  # [i, j]
    exact = float((1.0 / ratios.sum(1)).sum())
    distance = float((target - draft).abs().sum()) / 2
    assert rate == pytest.approx(exact, abs=4.5 * (exact * (1 - exact) / count) ** 0.5)
    assert exact >= (1 - distance) / (1 + distance)
    uncoupled = float((target * draft).max())  # what independent draws give is less still
    assert exact > uncoupled


def test_greedy_requests_keep_their_logits():
    sampler = KnownNoise(3)
    requests = requests_with(sampler, 3)
    requests[1].noise = None
    logits = random_logits(3, 2, VOCAB)
    ranked = coupled(requests, 1, logits, no_paths)
    assert torch.equal(ranked[1], logits[1])
    for row in (0, 2):
        expected = (logits[row] - sampler.at(1, row).log()) / SHARPNESS
        torch.testing.assert_close(ranked[row], expected)
    for request in requests:
        request.noise = None
    assert coupled(requests, 1, logits, no_paths) is logits


def test_noise_of_another_kind_couples_nothing():
    class Own:
        def after(self, depth):
            raise AssertionError("not asked for")

    logits = random_logits(1, 1, VOCAB)
    request = Request(0, RequestParams([1], 4, is_sampled=True), new_noise=lambda _: Own())
    assert coupled([request], 0, logits, no_paths) is logits


@pytest.mark.parametrize("draft_vocab", [VOCAB - 2, VOCAB + 3])
def test_vocabularies_of_different_sizes(draft_vocab):
    sampler = KnownNoise(2)
    logits = random_logits(2, 3, draft_vocab)
    ranked = coupled(requests_with(sampler, 2), 0, logits, no_paths)
    assert ranked.shape == logits.shape
    shared = min(VOCAB, draft_vocab)
    noise = torch.stack([sampler.at(0, row) for row in range(2)])[:, None, :shared]
    torch.testing.assert_close(
        ranked[..., :shared], (logits[..., :shared] - noise.log()) / SHARPNESS
    )
    assert bool((ranked[..., shared:] == -torch.inf).all())


def test_processors_get_the_path_of_every_node():
    seen: list[list[list[int]]] = []

    def forbid_repeats(input_ids, scores):
        assert input_ids is not None
        seen.append(input_ids.tolist())
        return scores.scatter(1, input_ids, -torch.inf)

    sampler = KnownNoise(2)
    requests = requests_with(sampler, 2, (forbid_repeats,), reads_text=True)
    paths = {0: [[4, 5], [4, 6]], 1: [[0, 6], [5, 5]]}
    ranked = coupled(
        requests, 2, random_logits(2, 2, VOCAB), lambda place: torch.tensor(paths[place])
    )
    assert seen == [[[1, 2, 3, *path] for path in paths[place]] for place in (0, 1)]
    for place, own in paths.items():
        for node, path in enumerate(own):
            forbidden = sorted({1, 2, 3, *path})
            assert (ranked[place, node] == -torch.inf).nonzero()[:, 0].tolist() == forbidden


def test_processors_that_refuse_the_drafts_scores_end_the_coupling_alone():
    def refuse(input_ids, scores):
        raise ValueError("not for these")

    sampler = KnownNoise(2)
    refused, sound = (
        requests_with(sampler, 1, (refuse,), reads_text=False)[0],
        requests_with(sampler, 2)[1],
    )
    logits = random_logits(2, 2, VOCAB)
    ranked = coupled([refused, sound], 0, logits, no_paths)
    assert torch.equal(ranked[0], logits[0]) and refused.noise is None
    assert not torch.equal(ranked[1], logits[1]) and sound.noise is not None


def test_noise_of_some_tokens():
    """Infinite for tokens that the target has no logits of."""
    cpu = torch.device("cpu")
    record = Record(1, GenerationConfig())
    sampler = StockSampler([[]], True, [[1]], cpu, lambda length: 0, record, seed=3)
    request = Request(0, RequestParams([1], 4, is_sampled=True))
    sampler._drawn(torch.zeros(1, VOCAB), [(0, 0)])
    (whole,) = sampler.noise_after([request], 1).tolist()
    (picked,) = sampler.noise_after([request], 1, [4, VOCAB, 0, VOCAB + 7]).tolist()
    assert picked == [whole[4], torch.inf, whole[0], torch.inf]
    assert sampler.noise_after([request], 1, []).shape == (1, 0)


def test_noise_given_to_drafters_is_a_copy():
    sampler = KnownNoise(1)
    (request,) = requests_with(sampler, 1)
    assert request.noise is not None
    before = request.noise.after(1).clone()
    request.noise.after(1).zero_()
    assert torch.equal(request.noise.after(1), before)
