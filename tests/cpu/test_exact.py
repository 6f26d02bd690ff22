"""Output that is exact in bf16, bit for bit: that of stock ``generate``, or always the same."""

from __future__ import annotations

import copy
import random
import shutil
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model import exact_trial
from hf_slospec.model.packed_model import PackedModel
from tests.support.breadth import nightly_but, quick_or
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
PATHS = [
    pytest.param(("small", False), id="eager"),
    pytest.param(("small", "wait"), id="compiled", marks=NEEDS_COMPILER),
    pytest.param(("embedded", False), id="embedded pair", marks=pytest.mark.nightly),
    pytest.param(
        ("embedded", "wait"),
        id="embedded pair compiled",
        marks=[NEEDS_COMPILER, pytest.mark.nightly],
    ),
]


@pytest.fixture(params=PATHS)
def path(request):
    """Whose forwards, and the setting ``compile``."""
    return request.param


@pytest.fixture
def compile(path):
    return path[1]


@pytest.fixture(scope="module")
def pair():
    """The embedded pair in bf16, and prompts that share beginnings."""
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    texts = [
        *tiny_prompts()[:4],
        tiny_prompts()[0] + tiny_prompts()[4],
        tiny_prompts()[0] + tiny_prompts()[5],
    ]
    return target, draft, tokenizer, [tokenizer(text)["input_ids"][-90:] for text in texts]


@pytest.fixture
def models(pair, path):
    """A target, a drafter, a tokenizer and prompts of which some share beginnings.

    Beside a compiled target, prompt lookup drafts: a draft model would have to be compiled, too.
    """
    if path[0] == "small":
        ids = torch.randint(3, 100, (2, 90), generator=torch.Generator().manual_seed(0)).tolist()
        prompts = [
            ids[0],
            ids[0][:50] + ids[1][:30],
            ids[1][:70],
            ids[1][:20],
            ids[0][:40],
            ids[0][:41] + ids[1][:40],
        ]
        draft = (
            None if path[1] else copy.deepcopy(tiny_model("llama", noise=0.03)).to(torch.bfloat16)
        )
        return copy.deepcopy(tiny_model("llama")).to(torch.bfloat16), draft, None, prompts
    target, draft, tokenizer, prompts = pair
    return target, None if path[1] else draft, tokenizer, prompts


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


def submitted(generator, prompts, order, **options):
    """Return the new tokens of prompts that are submitted together, in this order."""
    with generator:
        handles = {
            index: generator.submit(torch.tensor([prompts[index]]), **options) for index in order
        }
        return [handles[index].result(timeout=300).token_ids for index in range(len(prompts))]


def test_bits_in_the_batcher(pair, monkeypatch):
    for name, value in quick_or(dict(PROMPTS=(61, 3), DEPTH=4), {}).items():  # shapes of the trial
        monkeypatch.setattr(exact_trial, name, value)
    target, draft, tokenizer, prompts = pair
    prompts = [ids[-quick_or(40, 90) :] for ids in prompts]
    options: dict[str, Any] = dict(max_new_tokens=quick_or(5, 8), do_sample=False)
    inputs = [
        dict(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        for ids in prompts
    ]
    expected = [alone(target, one, **options)[0] for one in inputs]
    config = SLOSpecConfig(exact="bits", prefill_chunk=16, **DRAFTING)
    for seed, (kv_tokens, drafter) in enumerate(
        [(20_000, draft), (quick_or(170, 260), draft), (20_000, None)]
    ):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        generator = SLOSpecGenerator(
            target, drafter, tokenizer, config.model_copy(update=dict(kv_tokens=kv_tokens))
        )
        assert submitted(generator, prompts, order, **options) == expected


def test_self_is_the_same_whatever_runs_beside(models, compile):
    target, drafter, tokenizer, prompts = models
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)
    policies = dict(policy="none"), dict(policy="fixed", max_depth=5, max_width=1), DRAFTING
    texts = []
    for seed, (own, kv_tokens, chunk) in enumerate(
        zip(policies, (20_000, 260, 260), (512, 512, 7), strict=True)
    ):
        config = SLOSpecConfig(
            exact="self", compile=compile, kv_tokens=kv_tokens, prefill_chunk=chunk, **own
        )
        generator = SLOSpecGenerator(target, drafter if seed else None, tokenizer, config)
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        texts.append(submitted(generator, prompts, order, **options))
        if compile:
            assert generator.stats().forwards["target"] == "compiled"
    generator = SLOSpecGenerator(target, drafter, tokenizer, config)
    texts.append(
        [
            generator.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
            for ids in prompts
        ]
    )
    assert all(text == texts[0] for text in texts)


def test_self_with_seeds(models, compile):
    target, drafter, tokenizer, prompts = models
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=True, temperature=0.8, seed=7)
    texts = [
        submitted(SLOSpecGenerator(target, own, tokenizer, config), prompts, order, **options)
        for own, config, order in (
            (drafter, SLOSpecConfig(exact="self", compile=compile, **DRAFTING), range(6)),
            (
                None,
                SLOSpecConfig(exact="self", compile=compile, policy="none", max_batch=1),
                range(5, -1, -1),
            ),
        )
    ]
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
