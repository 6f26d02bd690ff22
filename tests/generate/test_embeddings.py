"""Prompts given as embeddings, and prompts with masked tokens."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedOptionError,
)
from tests.support.against_stock import GREEDY, SAMPLED, generator
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model


@pytest.mark.parametrize("family", nightly_but(["llama", "gemma2"], ["llama", "gemma2", "gpt2"]))
@pytest.mark.parametrize("batch", nightly_but([3], [1, 3]))
@pytest.mark.parametrize("with_ids", [False, True])
def test_prompt_given_as_embeddings(family: str, batch: int, with_ids: bool) -> None:
    ours = generator(family)
    inputs = ragged_prompts(batch, seed=batch)
    embeds = ours.model.get_input_embeddings()(inputs["input_ids"]).detach()
    soft = embeds + 0.05 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(3))
    given = {"inputs_embeds": soft, "attention_mask": inputs["attention_mask"]}
    if with_ids:
        given["input_ids"] = inputs["input_ids"]
    for mode in quick_or((SAMPLED,), (GREEDY, SAMPLED)):
        assert_same_as_stock(ours.model, ours.generate, given, **mode)
    if not with_ids:
        assert_same_as_stock(
            ours.model, ours.generate, given, max_length=embeds.shape[1] + 9, do_sample=False
        )


def test_embeddings_of_tokens_are_drafted_for_as_those_tokens() -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(
        model,
        model,
        config=SLOSpecConfig(policy="adaserve", max_depth=4, max_width=1, token_budget=64),
    )
    embeds = model.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    out = ours.generate(
        inputs_embeds=embeds,
        do_sample=False,
        max_new_tokens=21,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert out.slo[0].acceptance_length == 5.0


def test_several_sequences_of_embeddings() -> None:
    ours = generator()
    embeds = ours.model.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    assert_same_as_stock(
        ours.model, ours.generate, {"inputs_embeds": embeds}, **SAMPLED, num_return_sequences=2
    )


def test_tokens_masked_in_the_middle() -> None:
    for family in ("llama", "gpt2"):
        ours = generator(family)
        inputs = ragged_prompts(2)
        inputs["attention_mask"][0, -5:-2] = 0
        assert_same_as_stock(ours.model, ours.generate, inputs, **GREEDY)
    inputs["attention_mask"][0, -5:-2] = 0
    with pytest.raises(UnsupportedOptionError, match="sliding window"):
        generator("mistral-window").generate(**inputs, **GREEDY)
