"""fp32 identity with stock ``generate``: families, batches, drafts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair, tiny_prompts
from hf_slospec.engine.interfaces import Plan
from hf_slospec.policies.fixed import FixedPolicy
from hf_slospec.request.request import Request
from tests.support.breadth import nightly_but, nightly_rows_but, quick_or
from tests.support.toys.tiny_models import (
    FAMILIES,
    assert_same_as_stock,
    ragged_prompts,
    tiny_model,
)

GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=30, top_p=0.95)
DRAFTS = {"perfect": dict(seed=0), "useless": dict(seed=1), "fair": dict(seed=0, noise=0.03)}
BATCHES = 1, 3, 8
# This policy always drafts; four levels cost half as many draft forwards as the default.
CHECKED = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(3, 4)
)


ALL_DRAFTS = ("llama", "mistral-window", "gpt2", "gemma3")


@pytest.mark.parametrize(
    ("family", "draft", "batch"),
    [
        (family, draft, BATCHES[(number + shift) % 3])
        for shift, family in enumerate(ALL_DRAFTS)
        for number, draft in enumerate(DRAFTS)
    ]
    + nightly_rows_but(
        [(family, "fair", 3) for family in ("mixtral", "gemma2", "gpt-oss")],
        [(family, "fair", 3) for family in FAMILIES if family not in ALL_DRAFTS],
    ),
)
def test_same_tokens_as_stock(family: str, draft: str, batch: int) -> None:
    model = tiny_model(family)
    generator = SLOSpecGenerator(model, tiny_model(family, **DRAFTS[draft]), config=CHECKED)
    targets = [(0.001, None, 10.0)[row % 3] for row in range(batch)]
    for options in (GREEDY, SAMPLED):
        out = assert_same_as_stock(
            model,
            lambda **kwargs: generator.generate(**kwargs, slo_tpot=targets),
            ragged_prompts(batch, seed=batch),
            **options,
            max_new_tokens=quick_or(12, 18),
        )
        assert all(metrics.accepted <= metrics.drafted for metrics in out.slo)


@pytest.mark.parametrize("attention", ["sdpa", "4d_mask"])
@pytest.mark.parametrize(
    "shape", nightly_but([(0, 1), (4, 1), (7, 6)], [(0, 1), (1, 1), (4, 1), (1, 5), (7, 6)])
)
def test_same_tokens_for_every_tree_shape_and_backend(
    shape: tuple[int, int], attention: Any
) -> None:
    model = tiny_model("mistral-window")
    draft = tiny_model("mistral-window", noise=0.03)
    config = SLOSpecConfig(
        max_depth=shape[0], max_width=shape[1], attention=attention, check_invariants=True
    )
    for options in (GREEDY, SAMPLED):
        generator = SLOSpecGenerator(model, draft, config=config)
        assert_same_as_stock(
            model, generator.generate, ragged_prompts(4), **options, max_new_tokens=quick_or(12, 20)
        )


def test_perfect_draft_commits_whole_chains() -> None:
    model = tiny_model("llama")
    config = SLOSpecConfig(policy="adaserve", max_depth=4, max_width=1, token_budget=10)
    out = assert_same_as_stock(
        model, SLOSpecGenerator(model, model, config=config).generate, ragged_prompts(1, seed=3), **GREEDY,
        max_new_tokens=31, eos_token_id=None,
    )  # fmt: skip
    assert (
        out.slo[0].acceptance_length == 5.0
    )  # every step: four accepted nodes and the bonus token
    assert out.slo[0].steps == 6


def test_draft_of_another_family_and_fewer_positions() -> None:
    model = tiny_model("llama")
    draft = tiny_model("gpt2")
    long = {
        "input_ids": torch.randint(3, 101, (2, 110)),
        "attention_mask": torch.ones(2, 110, dtype=torch.int64),
    }
    generator = SLOSpecGenerator(model, draft, config=CHECKED)
    assert_same_as_stock(model, generator.generate, long, **GREEDY, max_new_tokens=quick_or(20, 50))


@pytest.mark.parametrize("eos", [2, [2, 17, 40, 41, 42]])
def test_rows_stop_at_any_eos_and_are_padded_as_stock_pads(eos: Any) -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CHECKED)
    for options in (GREEDY, SAMPLED):
        out = assert_same_as_stock(
            model,
            generator.generate,
            ragged_prompts(8),
            **options,
            max_new_tokens=40,
            eos_token_id=eos,
            pad_token_id=5,
        )
        assert (
            len({metrics.tokens for metrics in out.slo}) > 1
        )  # the test is about rows that end apart


def test_embedded_pair_is_exact_on_real_text() -> None:
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    generator = SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(check_invariants=True))
    for batch in quick_or((4,), (1, 6)):
        inputs = tokenizer(tiny_prompts()[:batch], return_tensors="pt", padding=True)
        for options in quick_or((SAMPLED,), (GREEDY, SAMPLED)):
            assert_same_as_stock(
                target, generator.generate, dict(inputs), **options, max_new_tokens=quick_or(16, 24)
            )


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((600,), SAMPLED),
        pytest.param((1100, 700), GREEDY, marks=pytest.mark.nightly),
        ((1030, 40), SAMPLED),
    ],
    ids=str,
)
def test_prompts_of_many_tokens(lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    """As long as users' are: they are read in several steps, some rows or all of them."""
    target, draft, tokenizer = load_tiny_pair(torch.float32)
    text = tokenizer("".join(tiny_prompts()))["input_ids"]
    prompts = {"input_ids": [text[:length] for length in lengths]}
    inputs = tokenizer.pad(prompts, padding=True, padding_side="left", return_tensors="pt")
    generator = SLOSpecGenerator(target, draft, tokenizer, SLOSpecConfig(check_invariants=True))
    assert_same_as_stock(target, generator.generate, dict(inputs), **options, max_new_tokens=12)


def test_processors_that_look_at_the_sequence() -> None:
    model = tiny_model("qwen2")
    generator = SLOSpecGenerator(model, tiny_model("qwen2", noise=0.03), config=CHECKED)
    for options in (GREEDY, SAMPLED):
        assert_same_as_stock(
            model, generator.generate, ragged_prompts(3), **options, max_new_tokens=quick_or(16, 30), min_new_tokens=10,
            repetition_penalty=1.3, no_repeat_ngram_size=3,
        )  # fmt: skip


def test_drafting_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were passed over are fed to the draft what they emitted meanwhile."""
    rng = np.random.default_rng(0)
    shape = SLOSpecConfig(max_depth=4, max_width=2)

    class ForSome(FixedPolicy):
        def plan(
            self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
        ) -> Plan:
            some = rng.permutation(len(requests))[: rng.integers(len(requests) + 1)]
            return replace(
                super().plan(requests, begun_s), drafting=[requests[index] for index in some]
            )

    monkeypatch.setattr(
        "hf_slospec.generate.speculator.new_policy", lambda _, costs, *others: ForSome(shape, costs)
    )
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CHECKED)
    for options in (GREEDY, SAMPLED):
        out = assert_same_as_stock(
            model, generator.generate, ragged_prompts(5), **options, max_new_tokens=quick_or(20, 32)
        )
        assert sum(metrics.accepted for metrics in out.slo) > 0
