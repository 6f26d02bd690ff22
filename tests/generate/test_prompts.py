"""Prompts: shapes that are taken as stock takes them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_drafter,
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


def test_right_padding(model: Any) -> None:
    inputs = {name: tensor.flip(1) for name, tensor in ragged_prompts(2).items()}
    with pytest.raises(InvalidInputError, match="pad on the left"):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)


def test_empty_prompts(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        model.generate(torch.empty(1, 0, dtype=torch.int64), **OPTIONS, slo_tpot=0.1)
    inputs = ragged_prompts(2)
    inputs["attention_mask"][0] = 0
    with pytest.raises(InvalidInputError, match=r"row 0 .* empty"):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)


def test_longer_than_a_position_table(model: Any) -> None:
    learned = SLOSpecGenerator(tiny_model("gpt2"))
    with pytest.raises(InvalidInputError, match=r"max_new_tokens=150 .* 160 positions"):
        learned.generate(**ragged_prompts(2), max_new_tokens=150)
    rotary = dict(
        do_sample=False, max_new_tokens=150, eos_token_id=None
    )  # has no table to fall off
    assert_same_as_stock(model, with_slo(model), ragged_prompts(1), **rotary)


def test_token_ids_of_another_vocabulary(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="tokenizer"):
        model.generate(torch.tensor([[5, 101]]), **OPTIONS, slo_tpot=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (dict(attention_mask=torch.ones(2, 3)), InvalidInputError, "attention_mask has shape"),
        (dict(attention_mask=torch.ones(3, 15)), InvalidInputError, "attention_mask has shape"),
    ],
)
def test_arguments_named_in_their_errors(model: Any, arguments: Any, error: Any, name: str) -> None:
    with pytest.raises(error, match=name):
        model.generate(torch.randint(3, 101, (2, 15)), **OPTIONS, slo_tpot=0.1, **arguments)


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (
            torch.ones(2, 3, 4, dtype=torch.int64),
            InvalidInputError,
            r"\[batch, length\] or \[length\]",
        ),
        (torch.ones(2, 4), InvalidTypeError, "int64, got torch.float32"),
        (torch.ones(2, 4, dtype=torch.uint8), InvalidTypeError, "int64, got torch.uint8"),
    ],
)
def test_ids_of_another_shape_or_dtype(
    model: Any, ids: torch.Tensor, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        model.generate(ids, **OPTIONS, slo_tpot=0.1)


@pytest.mark.parametrize("tokenizer", ["org/name", 3])
def test_a_tokenizer_that_is_none(model: Any, tokenizer: Any) -> None:
    stages = [{"slo_tpot": 0.1, "until": "x"}, {"slo_tpot": None}]
    with pytest.raises(InvalidTypeError, match="tokenizer must be a loaded tokenizer"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=[stages], tokenizer=tokenizer)
    with pytest.raises(InvalidTypeError, match="tokenizer must be a loaded tokenizer"):
        SLOSpecGenerator(tiny_model("llama"), tokenizer=tokenizer)
    with pytest.raises(InvalidTypeError, match="assistant_tokenizer must be a loaded tokenizer"):
        load_drafter("lookup", tiny_model("llama"), assistant_tokenizer=tokenizer)
    with pytest.raises(InvalidTypeError, match="processor must be a loaded processor"):
        SLOSpecGenerator(tiny_model("llama"), processor=tokenizer)


def test_tokenizer_output_passed_whole(model: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"generate\(\*\*inputs\)"):
        model.generate(ragged_prompts(1), **OPTIONS, slo_tpot=0.1)


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
    monkeypatch.setattr("hf_slospec.scheduler.prefill.CHUNK", chunk)
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
