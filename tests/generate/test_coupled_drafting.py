"""Drafts that know the noise: the tokens of stock, and far more of them accepted."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from hf_slospec import Plan, Request, SLOSpecConfig, SLOSpecGenerator, TokenTree
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model

CHAIN = SLOSpecConfig(policy="fixed", max_depth=3, max_width=1, check_invariants=True)
NEW: dict[str, Any] = dict(do_sample=True, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
HONOURED: dict[str, dict[str, Any]] = {
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
def test_a_draft_equal_to_the_target_foresees_every_token(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, model, config=CHAIN)
    out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **NEW | options)
    for metrics in out.slo:
        left_over = CHAIN.max_depth  # drafted beyond the end
        assert metrics.accepted >= metrics.drafted - left_over
        assert metrics.tokens < 3 or metrics.accepted > 0


LEFT_OUT: dict[str, dict[str, Any]] = {
    "no repeated n-grams": dict(no_repeat_ngram_size=2),
    "guidance": dict(guidance_scale=1.5),
}


@pytest.mark.parametrize("options", LEFT_OUT.values(), ids=LEFT_OUT)
def test_processors_that_a_draft_leaves_out(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, model, config=CHAIN)
    out = assert_same_as_stock(model, ours.generate, ragged_prompts(2), **NEW | options)
    assert sum(metrics.accepted for metrics in out.slo) > 0


class Dice(LogitsProcessor):
    """Draws from the global generator, as a user's processor may."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand(()) * torch.linspace(0, 1, scores.shape[-1])


def noises(generator: SLOSpecGenerator, seen: list[Any]) -> SLOSpecGenerator:
    """Note every request's noise."""

    class Watching:
        def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
            seen.extend(request.noise for request in requests)
            return [TokenTree.root_only(request.tokens[-1]) for request in requests]

        def release(self, request: Request) -> None:
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
def test_which_requests_have_noise_that_is_known(options: dict[str, Any], knows: bool) -> None:
    seen: list[Any] = []
    watching = noises(SLOSpecGenerator(tiny_model("llama"), tiny_model("llama")), seen)
    watching.generate(**ragged_prompts(1), **NEW | options)
    assert seen and all((noise is not None) == knows for noise in seen)


def test_own_processors_that_draw_switch_coupling_off() -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CHAIN)
    options = NEW | dict(logits_processor=LogitsProcessorList([Dice()]))
    assert_same_as_stock(model, ours.generate, ragged_prompts(1), **options)


def accepted(config: SLOSpecConfig, options: dict[str, Any], noise: float = 0.01) -> int:
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
def test_coupling_accepts_more(options: dict[str, Any]) -> None:
    uncoupled = CHAIN.model_copy(update={"coupling": False})
    assert accepted(CHAIN, options) > 1.2 * accepted(uncoupled, options)


@pytest.mark.parametrize("num_bytes", [0, 10**4])
def test_with_little_noise_at_hand(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("hf_slospec.model.noise.MAX_NOISE_BYTES", num_bytes)
    accepted(SLOSpecConfig(policy="adaserve", token_budget=40, max_depth=quick_or(2, 4)), {})


@pytest.mark.parametrize("options", [dict(top_h=0.5), dict(eta_cutoff=0.3)], ids=str)
def test_a_draft_whose_tokens_are_all_banned(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    torch.manual_seed(0)
    draft = type(model)(
        type(model.config)(**model.config.to_dict() | {"vocab_size": VOCAB - 11})
    ).eval()
    ours = SLOSpecGenerator(model, draft, config=CHAIN)
    banned = dict(suppress_tokens=list(range(VOCAB - 11)))
    assert_same_as_stock(model, ours.generate, ragged_prompts(2), **NEW | options | banned)


def test_prompt_lookup_of_tokens_that_cannot_be_written() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head = torch.nn.Linear(32, 90, bias=False)
    prompt = torch.tensor([[5, 99, 97, 6, 99, 97, 8, 99, 97]])
    ours = SLOSpecGenerator(model, config=CHAIN)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    assert_same_as_stock(model, ours.generate, inputs, **NEW)


def test_a_call_leaves_no_noise_behind() -> None:
    kept: list[weakref.ref[Any]] = []
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


@pytest.mark.parametrize("vocab", [VOCAB - 4, VOCAB + 6])
def test_draft_with_another_vocabulary(vocab: int) -> None:
    torch.manual_seed(0)
    model, draft = tiny_model("llama"), tiny_model("llama", noise=0.01).__class__(
        tiny_model("llama").config.__class__(**tiny_model("llama").config.to_dict() | {"vocab_size": vocab})
    ).eval()  # fmt: skip
    ours = SLOSpecGenerator(model, draft, config=CHAIN)
    assert_same_as_stock(model, ours.generate, ragged_prompts(3), **NEW, repetition_penalty=1.2)


class Foresight:
    """Proposes what noise favours if all tokens are equally probable, and may draw random numbers
    itself.
    """

    def __init__(self, draws: bool):
        self.draws = draws

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
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

    def release(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("draws", [False, True])
def test_own_drafter_uses_the_noise(draws: bool) -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, drafter=Foresight(draws), config=CHAIN)
    flat = NEW | dict(temperature=1000.0, top_k=0, max_new_tokens=40)
    out = assert_same_as_stock(model, ours.generate, ragged_prompts(3), **flat)
    assert sum(metrics.accepted for metrics in out.slo) > 0.9 * sum(
        metrics.drafted for metrics in out.slo
    )
