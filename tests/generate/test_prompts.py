"""Prompts: shapes that are taken as stock takes them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
)
from tests.support.breadth import nightly_but, quick_or
from tests.support.enabled_model import OPTIONS, with_slo
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model


def test_one_dimensional_ids_and_positional_inputs(model: Any) -> None:
    ids = ragged_prompts(1)["input_ids"]
    expected = type(model).generate(model, ids, **OPTIONS)
    assert torch.equal(model.generate(ids[0], **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(model.generate(ids, **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(
        model.generate(inputs=ids, attention_mask=torch.ones_like(ids), **OPTIONS, slo_tpot=0.1),
        expected,
    )


def test_max_length_and_one_new_token(model: Any) -> None:
    inputs = ragged_prompts(2)
    length = inputs["input_ids"].shape[1]
    assert_same_as_stock(model, with_slo(model), inputs, do_sample=False, max_length=length + 5)
    out = assert_same_as_stock(model, with_slo(model), inputs, do_sample=False, max_new_tokens=1)
    assert [metrics.tpot_s for metrics in out.slo] == [None, None]


def test_longer_than_the_positions_of_a_rotary_model(model: Any) -> None:
    rotary = dict(
        do_sample=False, max_new_tokens=150, eos_token_id=None
    )  # has no table to fall off
    assert_same_as_stock(model, with_slo(model), ragged_prompts(1), **rotary)


@pytest.mark.parametrize("family", nightly_but(["mistral-window"], ["llama", "mistral-window"]))
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(do_sample=True), marks=pytest.mark.nightly),
        dict(do_sample=True, repetition_penalty=1.2),
    ],
    ids=["greedy", "sampled", "seen"],
)
@pytest.mark.parametrize("chunk", [5, 16])  # all prompts are longer, or some
def test_prompts_longer_than_a_chunk(
    chunk: int, options: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_slospec.scheduler.static.CHUNK", chunk)
    model = tiny_model(family)
    generator = SLOSpecGenerator(
        model, tiny_model(family, noise=0.03), config=SLOSpecConfig(policy="adaserve")
    )
    assert_same_as_stock(model, generator.generate, ragged_prompts(4), **OPTIONS | options)


@pytest.mark.parametrize("kept", [1, 3])
def test_rows_far_behind_have_their_noise_drawn_again(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("hf_slospec.model.noise.MAX_NOISE_BYTES", kept * 4 * 101 * 4)
    model = tiny_model("llama")
    config = SLOSpecConfig(policy="adaserve", token_budget=12)
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.01), config=config)
    assert_same_as_stock(
        model, lambda **k: generator.generate(**k, slo_tpot=[1e-6, None, None, None]), ragged_prompts(4),
        do_sample=True, temperature=0.3, max_new_tokens=quick_or(30, 60),
    )  # fmt: skip
