"""Drafts that know the noise: the tokens of stock, and far more of them accepted."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, TokenTree
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model

CHAIN = SLOSpecConfig(policy="fixed", max_depth=3, max_width=1, check_invariants=True)
NEW = dict(do_sample=True, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
HONOURED = {
    "none": {},
    "temperature": dict(temperature=1.4),
    "top-k": dict(top_k=9, temperature=0.8),
    "top-p": dict(top_p=0.9),
    "min-p": dict(min_p=0.05),
    "typical": dict(typical_p=0.7),
    "epsilon": dict(epsilon_cutoff=0.02),
    "eta": dict(eta_cutoff=0.02),
    "top-h": dict(top_h=0.5),
    "repetition": dict(repetition_penalty=1.7),
    "suppressed": dict(suppress_tokens=[5, 6, 7, 8]),
    "biased": dict(sequence_bias=[[[11], 4.0], [[11, 12], 6.0], [[12, 13], -9.0]]),
    "banned": dict(bad_words_ids=[[20], [21, 22]]),
    "at the begin": dict(begin_suppress_tokens=[3, 4, 5]),
    "shortest": dict(min_new_tokens=20, eos_token_id=[9, 10, 11, 12]),
    "decaying": dict(exponential_decay_length_penalty=(4, 1.3), eos_token_id=9),
}


@pytest.mark.parametrize("options", HONOURED.values(), ids=HONOURED)
def test_a_draft_equal_to_the_target_foresees_every_token(options):
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, model, config=CHAIN)
    out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **NEW | options)
    for metrics in out.slo:
        left_over = CHAIN.max_depth  # drafted beyond the end
        assert metrics.accepted >= metrics.drafted - left_over
        assert metrics.tokens < 3 or metrics.accepted > 0


class Dice(LogitsProcessor):
    """Draws from the global generator, as a user's processor may."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand(()) * torch.linspace(0, 1, scores.shape[-1])


def noises(generator, seen):
    """Note every request's noise."""

    class Watching:
        def draft(self, requests, plan):
            seen.extend(request.noise for request in requests)
            return [TokenTree.root_only(request.tokens[-1]) for request in requests]

        def release(self, request):
            pass

    return SLOSpecGenerator(generator.model, drafter=Watching(), config=CHAIN)


@pytest.mark.parametrize(
    ("options", "knows"),
    [
        (dict(), True),
        (dict(temperature=0.5, no_repeat_ngram_size=2), True),
        (dict(do_sample=False), False),
        (dict(logits_processor=LogitsProcessorList([Dice()])), False),
        (dict(prefix_allowed_tokens_fn=lambda row, ids: [3, 4, 5, 6]), False),
    ],
    ids=["sampled", "n-grams", "greedy", "own processor", "own function"],
)
def test_requests_whose_noise_is_known_in_advance(options, knows):
    seen = []
    watching = noises(SLOSpecGenerator(tiny_model("llama"), tiny_model("llama")), seen)
    watching.generate(**ragged_prompts(1), **NEW | options)
    assert seen and all((noise is not None) == knows for noise in seen)


def accepted(config, options, noise=0.01):
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, tiny_model("llama", noise=noise), config=config)
    out = assert_same_as_stock(
        model,
        ours.generate,
        ragged_prompts(6),
        **NEW | options | dict(max_new_tokens=quick_or(36, 60)),
    )
    return sum(metrics.accepted for metrics in out.slo)


@pytest.mark.parametrize(
    "options",
    nightly_but(
        [dict(temperature=2.0)],
        [dict(temperature=2.0), dict(temperature=2.0, top_k=30, num_return_sequences=2)],
    ),
)
def test_coupling_accepts_more(options):
    uncoupled = CHAIN.model_copy(update={"coupling": False})
    assert accepted(CHAIN, options) > 1.2 * accepted(uncoupled, options)


def test_a_call_leaves_no_noise_behind():
    kept = []
    ours = noises(SLOSpecGenerator(tiny_model("llama"), tiny_model("llama")), seen := [])
    gc.collect()
    gc.disable()
    try:
        ours.generate(**ragged_prompts(2), **NEW)
        kept += [weakref.ref(noise.sampler) for noise in seen if noise is not None]
        seen.clear()
        assert kept and all(own() is None for own in kept)
    finally:
        gc.enable()


class Foresight:
    """Proposes what noise favours if all tokens are equally probable, and may draw random numbers
    itself.
    """

    def __init__(self, draws):
        self.draws = draws

    def draft(self, requests, plan):
        if self.draws:
            torch.rand(5)
        trees = []
        for request in requests:
            assert request.noise is not None
            tokens = [
                int(request.noise.after(depth)[:VOCAB].argmin()) for depth in range(plan.depth)
            ]
            trees.append(TokenTree.chain(request.tokens[-1], tokens, 0.5))
        return trees

    def release(self, request):
        pass


@pytest.mark.parametrize("draws", [False, True])
def test_own_drafter_uses_the_noise(draws):
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, drafter=Foresight(draws), config=CHAIN)
    flat = NEW | dict(temperature=1000.0, top_k=0, max_new_tokens=40)
    out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **flat)
    assert sum(metrics.accepted for metrics in out.slo) > 0.9 * sum(
        metrics.drafted for metrics in out.slo
    )
