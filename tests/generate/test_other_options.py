"""The other options of ``generate``: stock and ours on the same inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_slospec import (
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
    disable,
    enable,
)
from tests.support.against_stock import DRAFTS_ALWAYS, GREEDY, NEW, SAMPLED, check, generator
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model


def test_text_may_be_far_shorter_than_its_limit() -> None:
    options: dict[str, Any] = dict(do_sample=True, eos_token_id=[2, 17, 40, 41, 42])
    ours = generator()
    assert_same_as_stock(
        ours.model, ours.generate, ragged_prompts(3), **options, max_new_tokens=10**9
    )


@pytest.mark.parametrize("family", nightly_but(["mistral-window"], ["mistral-window", "gpt2"]))
def test_storage_grows_with_the_text(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("hf_slospec.model.sequence_room.FIRST_ROOM", 5)
    check(
        GREEDY | dict(max_new_tokens=quick_or(20, 36), eos_token_id=[2, 17]), (1, 3), family=family
    )
    check(
        SAMPLED | dict(max_new_tokens=quick_or(20, 36), eos_token_id=[2, 17]), (3,), family=family
    )


def test_model_in_training_mode() -> None:
    model = copy.deepcopy(tiny_model("gpt2")).train()
    ours = SLOSpecGenerator(model, tiny_model("gpt2"))
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        ours.generate(**ragged_prompts(1), **GREEDY)
    draft = copy.deepcopy(tiny_model("gpt2", noise=0.03)).train()
    ours = SLOSpecGenerator(tiny_model("gpt2"), draft, config=DRAFTS_ALWAYS)
    assert_same_as_stock(ours.model, ours.generate, ragged_prompts(2), **SAMPLED)
    assert draft.training
    llama = copy.deepcopy(tiny_model("llama")).train()  # has no dropout
    assert_same_as_stock(llama, SLOSpecGenerator(llama).generate, ragged_prompts(2), **SAMPLED)


def test_arguments_that_change_nothing() -> None:
    batches = quick_or((3,), (1, 3))
    check(GREEDY, batches, logits_to_keep=1)
    check(GREEDY, batches, prefill_chunk_size=4)
    check(GREEDY, batches, output_attentions=True, return_dict_in_generate=False)
    ours = generator()
    inputs = ragged_prompts(3)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_same_as_stock(ours.model, ours.generate, inputs, **GREEDY, position_ids=positions)
    with pytest.raises(UnsupportedOptionError, match="position_ids"):
        ours.generate(**inputs, **GREEDY, position_ids=positions + 1)


def test_no_prompt_at_all_starts_from_bos() -> None:
    ours = generator()
    assert_same_as_stock(ours.model, ours.generate, {}, **GREEDY)


def test_missing_pad_token() -> None:
    ours = generator()
    inputs = ragged_prompts(4, seed=2)
    assert_same_as_stock(
        ours.model, ours.generate, inputs, **GREEDY, pad_token_id=None, eos_token_id=[2, 17, 40, 41]
    )


def test_target_and_everything_else_from_a_saved_generation_config(tmp_path: Any) -> None:
    GenerationConfig(slo_tpot=[0.5, None], do_sample=True, top_k=9, **NEW, eos_token_id=2, pad_token_id=0,
                     return_dict_in_generate=True).save_pretrained(tmp_path)  # fmt: skip
    config = GenerationConfig.from_pretrained(tmp_path)
    model = enable(tiny_model("llama"), tiny_model("llama", noise=0.03))
    try:
        out = assert_same_as_stock(
            model, model.generate, ragged_prompts(2), generation_config=config
        )
    finally:
        disable(model)
    assert [metrics.tpot_slo_s for metrics in out.slo] == [0.5, None]


@pytest.mark.parametrize("place", ["argument", "config"])
def test_prompt_lookup_by_argument(place: str) -> None:
    lookup = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=2)
    ours = generator()
    inputs = {k: v.repeat(1, 2) for k, v in ragged_prompts(1).items()}
    expected = ours.model.generate(**inputs, do_sample=False, max_new_tokens=30)
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    if place == "config":
        options = dict(
            generation_config=GenerationConfig(**options, **lookup, eos_token_id=2, pad_token_id=0)
        )
        lookup = {}
    out = ours.generate(**inputs, **options, **lookup)
    assert torch.equal(out.sequences, expected)
    assert out.slo[0].drafted > 0
