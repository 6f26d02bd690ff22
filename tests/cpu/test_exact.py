"""Output that is exact in bf16, bit for bit: that of stock ``generate``, or always the same."""

from __future__ import annotations

import copy
import random
import shutil
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.packed_model import PackedModel
from tests.support.breadth import nightly_but
from tests.support.served_pair import answer
from tests.support.toys.tiny_models import FAMILIES, ragged_prompts, tiny_model

Inputs = dict[str, torch.Tensor]

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=24, pad_token_id=0)
SAMPLED: dict[str, Any] = dict(
    do_sample=True, temperature=0.9, top_p=0.95, max_new_tokens=24, pad_token_id=0
)
BF16_FAMILIES = ["llama", "mistral-window", "gemma3", "gpt2", "phi3", "qwen3"]
DRAFTING: dict[str, Any] = dict(policy="fixed", max_depth=4, max_width=3, check_invariants=True)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
COMPILE = [False, pytest.param("wait", marks=[NEEDS_COMPILER, pytest.mark.nightly])]


@pytest.fixture(scope="module")
def models():
    """Return a target and a drafter."""
    return [
        copy.deepcopy(tiny_model("llama", noise=noise)).to(torch.bfloat16) for noise in (0.0, 0.03)
    ]


def prompts():
    """Return prompts of which some share beginnings."""
    ids = torch.randint(3, 100, (2, 90), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        ids[0],
        ids[0][:50] + ids[1][:30],
        ids[1][:70],
        ids[1][:20],
        ids[0][:40],
        ids[0][:41] + ids[1][:40],
    ]


def alone(model, inputs, seed=0, **options):
    """Return stock's new tokens of every row alone, without padding."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [answer(model, ids[mask.bool()], seed, **options) for ids, mask in rows]


def padded(texts):
    longest = max(map(len, texts))
    return [text + [0] * (longest - len(text)) for text in texts]


def new_tokens(sequences, inputs):
    rows: list[list[int]] = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return rows


@pytest.mark.parametrize("family", nightly_but(["gpt2"], BF16_FAMILIES))
def test_bits_are_those_of_stock_for_every_row_alone(family):
    assert family in FAMILIES
    model, draft = (tiny_model(family, noise=noise).to(torch.bfloat16) for noise in (0.0, 0.03))
    try:
        generator = SLOSpecGenerator(model, draft, config=SLOSpecConfig(exact="bits", **DRAFTING))
        inputs = ragged_prompts(4, seed=3)
        out = generator.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        assert new_tokens(out.sequences, inputs) == padded(alone(model, inputs, **GREEDY))
        assert sum(metrics.accepted for metrics in out.slo)
        one = ragged_prompts(1, seed=3)
        for seed in range(3):
            torch.manual_seed(seed)
            ours = new_tokens(generator.generate(**one, **SAMPLED), one)
            assert ours == alone(model, one, seed, **SAMPLED)
    finally:
        tiny_model.cache_clear()


def submitted(generator, order, **options):
    """Return the new tokens of prompts that are submitted together, in this order."""
    texts = prompts()
    with generator:
        handles = {index: generator.submit([*texts[index]], **options) for index in order}
        return [handles[index].result(timeout=300).token_ids for index in range(len(texts))]


@pytest.mark.parametrize("compile", COMPILE)
def test_self_is_the_same_beside_any_requests(models, compile):
    # Beside a compiled target, prompt lookup drafts: a draft model would have to be compiled, too.
    target, drafter = models[0], None if compile else models[1]
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)
    policies = dict(policy="none"), dict(policy="fixed", max_depth=5, max_width=1), DRAFTING
    rooms = (20_000, 512), (260, 512), (260, 7)
    texts = []
    for seed, (own, (kv_tokens, chunk)) in enumerate(zip(policies, rooms, strict=True)):
        config = SLOSpecConfig(
            exact="self", compile=compile, kv_tokens=kv_tokens, prefill_chunk=chunk, **own
        )
        generator = SLOSpecGenerator(target, drafter if seed else None, config=config)
        texts.append(submitted(generator, random.Random(seed).sample(range(6), 6), **options))
        if compile:
            assert generator.stats().forwards["target"] == "compiled"
    generator = SLOSpecGenerator(target, drafter, config=config)
    alone = [generator.generate(torch.tensor([ids]), **options)[0] for ids in prompts()]
    texts.append([row[len(ids) :].tolist() for row, ids in zip(alone, prompts(), strict=True)])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("compile", COMPILE)
def test_self_with_seeds_is_the_same_beside_any_requests(models, compile):
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=True, temperature=0.8, seed=7)
    texts = []
    for drafter, own, order in (
        (None if compile else models[1], DRAFTING, range(6)),
        (None, dict(policy="none", max_batch=1), range(5, -1, -1)),
    ):
        config = SLOSpecConfig(exact="self", compile=compile, **own)
        texts.append(
            submitted(SLOSpecGenerator(models[0], drafter, config=config), order, **options)
        )
    assert texts[0] == texts[1]


def test_a_model_whose_trial_fails_is_refused(monkeypatch):
    plain = PackedModel.forward

    def forward(self, pool, parts, logit_rows):
        logits = plain(self, pool, parts, logit_rows)
        return logits + (
            1e-3 if len(logits) > 80 else 0.0
        )  # the trees of the trial of exact bits only

    monkeypatch.setattr(PackedModel, "forward", forward)
    with pytest.raises(
        UnsupportedModelError, match=r'exact="bits" cannot be had of LlamaForCausalLM.*"self"'
    ):
        SLOSpecGenerator(tiny_model("llama"), config=SLOSpecConfig(exact="bits"))
