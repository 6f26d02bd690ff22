"""Prompts with images: the output of stock ``generate``, token for token, on tiny models of many
families.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GitConfig, GitForCausalLM

from hf_slospec import (
    FallbackWarning,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate import images as multimodal_prompts
from hf_slospec.model.family import probe_layers
from hf_slospec.model.prefilled_prompts import sees_later_tokens
from hf_slospec.model.properties import CACHE_NAME, cache_option
from hf_slospec.tree.tree import TokenTree
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_image_models import (
    IMAGE,
    image_inputs,
    prompts_with_images,
    tiny_image_model,
)
from tests.support.toys.tiny_models import assert_same_as_stock, sharpened, tiny_model

CONFIG = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=24, max_depth=3, max_width=2
)
OPTIONS = dict(max_new_tokens=quick_or(9, 12), pad_token_id=0, eos_token_id=2)
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=30)

FAMILIES = """Qwen2VL Qwen2_5_VL Qwen3VL Gemma3 Gemma4 Llava LlavaNext LlavaOnevision Mistral3 InternVL Idefics3 SmolVLM
PaliGemma Qwen3_5 Qwen3_5Moe""".split()


def name_of(family):
    return f"{family}ForConditionalGeneration"


def stock(model, inputs, **options):
    torch.manual_seed(7)
    return type(model).generate(model, **copy.deepcopy(inputs), **OPTIONS | options)


@pytest.mark.parametrize("family", nightly_but(["Gemma3", "Idefics3"], FAMILIES))
def test_images_have_an_effect(family):
    """Otherwise comparisons with stock would show nothing."""
    model, inputs = image_inputs(name_of(family), seed=1, images=(1, 2))
    options = dict(max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    pixels = inputs["pixel_values"]
    others = inputs | {"pixel_values": torch.rand_like(pixels) * (pixels != 0)}
    first, second = (stock(model, own, **options).scores[0] for own in (inputs, others))
    assert (first - second).abs().max() > 0.01


class ReadsFeatures:
    """Drafts nothing, and records of which tokens it got hidden states."""

    feature_layers = (1, 2)

    def __init__(self):
        self.places = {}

    def take_features(self, request, begin, features):
        self.places.setdefault(request.index, []).extend(range(begin, begin + len(features)))

    def draft(self, requests, plan):
        return [TokenTree.root_only(request.tokens[-1]) for request in requests]

    def release(self, request):
        """Keep nothing."""


def test_features_begin_with_the_last_token_of_the_prompt():
    model, inputs = image_inputs(name_of("Qwen2VL"), seed=1, images=(1, 2))
    drafter = ReadsFeatures()
    options = OPTIONS | dict(eos_token_id=None)
    ours = SLOSpecGenerator(model, drafter=drafter, config=CONFIG)
    assert torch.equal(ours.generate(**inputs, **options), stock(model, inputs, **options))
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        places = drafter.places[row]
        assert places == list(range(length - 1, length - 1 + len(places))) and len(places) > 5


def test_stock_generate_continues_as_if_nothing_had_run():
    model, inputs = image_inputs(name_of("Qwen3VL"), seed=3)
    ours = SLOSpecGenerator(model, config=CONFIG)
    more = torch.randint(3, IMAGE, (1, 5), generator=torch.Generator().manual_seed(0))

    def two_turns(generate):
        first = generate(**copy.deepcopy(inputs), **OPTIONS, return_dict_in_generate=True)
        ids = torch.cat((first.sequences, more), dim=1)
        mask = torch.ones_like(ids)
        second = type(model).generate
        return second(
            model, input_ids=ids, attention_mask=mask, **cache_option(first[CACHE_NAME]), **OPTIONS
        )

    assert torch.equal(two_turns(ours.generate), two_turns(type(model).generate.__get__(model)))


def test_text_without_images_is_not_processed_as_a_whole(monkeypatch):
    model = tiny_image_model(name_of("Qwen2VL"))
    inputs = prompts_with_images(model, 4, (0, 0))
    expected = stock(model, inputs)
    monkeypatch.setattr(multimodal_prompts.WholePrompts, "_process", None)
    assert torch.equal(
        SLOSpecGenerator(model, config=CONFIG).generate(**inputs, **OPTIONS), expected
    )


def test_texts_that_are_seen_from_both_sides():
    model = tiny_image_model(name_of("PaliGemma"))
    assert sees_later_tokens(model) and probe_layers(model)
    assert not sees_later_tokens(tiny_image_model(name_of("Gemma3")))
    ours = SLOSpecGenerator(
        model, tiny_image_model(name_of("PaliGemma"), noise=0.03), config=CONFIG
    )
    ids = torch.randint(3, IMAGE, (1, 17), generator=torch.Generator().manual_seed(0))
    for sampling in ({}, SAMPLING):
        assert_same_as_stock(model, ours.generate, {"input_ids": ids}, **OPTIONS, **sampling)
    with ours, pytest.raises(UnsupportedModelError, match="prompt"):
        ours.prompt_logprobs(ids)


def test_a_model_that_packed_forwards_do_not_follow_is_refused(monkeypatch):
    model, inputs = image_inputs(name_of("Qwen2VL"))
    expected = stock(model, inputs)
    right = multimodal_prompts._last_position
    monkeypatch.setattr(
        multimodal_prompts, "_last_position", lambda *arguments: right(*arguments) + 5
    )
    ours = SLOSpecGenerator(model, config=CONFIG)
    with pytest.raises(UnsupportedModelError, match="logits of a packed forward differ"):
        ours.generate(**inputs, **OPTIONS)
    with pytest.warns(FallbackWarning, match="logits of a packed forward differ"):
        assert torch.equal(ours.generate(**inputs, **OPTIONS, fallback=True), expected)


def test_images_before_the_text_are_refused():
    """GIT caches K/V of an image that no token of the text stands for."""
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8,
                  patch_size=4)  # fmt: skip
    config = GitConfig(
        vision_config=vision, vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = sharpened(lambda: GitForCausalLM(config), 0)
    inputs = dict(input_ids=torch.randint(3, 99, (1, 6)), pixel_values=torch.randn(1, 3, 8, 8))
    ours = SLOSpecGenerator(model, config=CONFIG)
    with pytest.raises(
        UnsupportedOptionError, match="pixel_values of GitForCausalLM, which has no placeholder"
    ):
        ours.generate(**inputs, **OPTIONS)
    with pytest.warns(FallbackWarning, match="placeholder"):
        assert torch.equal(ours.generate(**inputs, **OPTIONS, fallback=True), stock(model, inputs))
    assert torch.equal(
        ours.generate(inputs["input_ids"], **OPTIONS),
        stock(model, {"input_ids": inputs["input_ids"]}),
    )


def test_what_cannot_be_combined_with_images():
    model, inputs = image_inputs(name_of("Qwen2VL"))
    ours = SLOSpecGenerator(model, config=CONFIG)
    end = int((inputs["input_ids"][0] == IMAGE).nonzero()[-1]) + 1
    shape = inputs["input_ids"].shape
    cut = {
        name: value[:, :end] if value.shape == shape else value for name, value in inputs.items()
    }
    with pytest.raises(UnsupportedInputError, match="row 0 of input_ids ends with an image"):
        ours.generate(**cut, **OPTIONS)
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        ours.generate(**inputs, **OPTIONS, num_beams=2)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(UnsupportedOptionError, match="inputs_embeds cannot be combined"):
        ours.generate(**inputs, inputs_embeds=embeds, **OPTIONS)
    first = type(model).generate(model, **inputs, **OPTIONS, return_dict_in_generate=True)
    ids = torch.cat((first.sequences, inputs["input_ids"]), dim=1)
    both = {
        name: torch.cat((inputs[name], inputs[name])) for name in ("pixel_values", "image_grid_thw")
    }
    both |= {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    with pytest.raises(UnsupportedOptionError, match=f"{CACHE_NAME} that holds tokens"):
        ours.generate(**both, **cache_option(first[CACHE_NAME]), **OPTIONS)
    text = SLOSpecGenerator(tiny_model("llama"), config=CONFIG)
    with pytest.raises(ValueError, match="pixel_values"):
        text.generate(**inputs, **OPTIONS)
