"""Caches passed in and handed back: stock and ours over several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from hf_slospec import InvalidInputError, SLOSpecGenerator, UnsupportedOptionError
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.against_stock import DRAFTS_ALWAYS, GREEDY, check, generator
from tests.support.breadth import quick_or
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import assert_same_cache, ragged_prompts, sharpened, tiny_model

FAMILIES = ["llama", "mistral-window", "gemma3", "gpt2"]


def text_and_cache(family: str, batch: int, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A first turn written into the cache by stock.  -> the text so far, with new words after it,
    and its mask
    """
    inputs = ragged_prompts(batch, seed=batch)
    text = tiny_model(family).generate(
        **inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, **cache_option(cache)
    )
    new = torch.randint(3, 101, (batch, 5), generator=torch.Generator().manual_seed(4))
    return torch.cat((text, new), 1), torch.cat(
        (inputs["attention_mask"], torch.ones(batch, 13).long()), 1
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch", "is_whole_text"), [(1, False), (3, True)])
def test_second_turn_on_a_cache(family: str, batch: int, is_whole_text: bool) -> None:
    ours = generator(family)
    caches = []
    outputs = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        caches.append(DynamicCache(config=ours.model.config))
        text, mask = text_and_cache(family, batch, caches[-1])
        ids = text if is_whole_text else text[:, caches[-1].get_seq_length() :]
        outputs.append(
            generate(
                input_ids=ids, attention_mask=mask, **cache_option(caches[-1]), do_sample=False,
                max_new_tokens=quick_or(12, 20), eos_token_id=None, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[1][CACHE_NAME] is caches[1]
    assert_same_cache(caches[1], caches[0], mask)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # transformers' own
@pytest.mark.parametrize("name", sorted({CACHE_NAME, "past_key_values"}))
def test_a_cache_by_both_of_its_names(name: str) -> None:
    ours = generator("llama")
    cache = DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 1, cache)
    options: dict[str, Any] = dict(
        attention_mask=mask, do_sample=False, eos_token_id=None, max_new_tokens=10
    )
    expected = ours.model.generate(text, **options)
    assert torch.equal(ours.generate(text, **options, **{name: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    with pytest.raises(InvalidInputError, match=f"{CACHE_NAME} holds"):
        ours.generate(text, **options, **{name: cache})
    with pytest.raises(UnsupportedOptionError, match=f"{name} and use_cache=False contradict"):
        ours.generate(text, **options, use_cache=False, **{name: cache})


@pytest.mark.parametrize("family", FAMILIES)
def test_our_cache_serves_a_second_turn(family: str) -> None:
    ours = generator(family)
    cache = DynamicCache(config=tiny_model(family).config)
    inputs = ragged_prompts(1)
    text = ours.generate(
        **inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, **cache_option(cache)
    )
    assert cache.get_seq_length() == text.shape[1] - 1  # filled though no dict was asked for
    expected = ours.model.generate(text, do_sample=False, max_new_tokens=10, eos_token_id=None)
    again = ours.model.generate(
        text, do_sample=False, max_new_tokens=10, eos_token_id=None, **cache_option(cache)
    )
    assert torch.equal(again, expected)


@pytest.mark.parametrize("family", ["Zamba", "Bamba", "Mamba2", "FalconMamba", "Qwen3Next"])
def test_second_turn_on_a_returned_cache_with_states(family: str) -> None:
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = tiny_config(model_class.config_class)
    model, draft = (sharpened(lambda: model_class(config), 0, noise) for noise in (0.0, 0.03))
    ours = SLOSpecGenerator(model, draft, config=DRAFTS_ALWAYS)
    options: dict[str, Any] = dict(do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    (name,) = cache_option(None, model)
    ids = torch.randint(3, 101, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, **options, max_new_tokens=12).sequences
    for first in (model.generate, ours.generate):
        turn = first(input_ids=ids, **options, max_new_tokens=5)
        again = {name: turn[name] if name in turn else turn[CACHE_NAME]}
        mask = torch.ones_like(turn.sequences)
        got = ours.generate(
            turn.sequences, attention_mask=mask, **options, **again, max_new_tokens=7
        )
        assert torch.equal(got.sequences, expected)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])
def test_static_cache_over_three_turns(family: str) -> None:
    ours = generator(family)
    texts = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        cache, text = (
            StaticCache(config=ours.model.config, max_cache_len=96),
            ragged_prompts(1)["input_ids"],
        )
        for turn in range(3):
            new = torch.full((1, 4), 7 + turn)
            text = generate(
                torch.cat((text, new), 1),
                do_sample=False,
                max_new_tokens=8,
                eos_token_id=None,
                **cache_option(cache),
            )
        texts.append(text)
    assert torch.equal(*texts)


def test_cache_of_another_batch_or_model() -> None:
    ours = generator()
    cache = DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 2, cache)
    with pytest.raises(InvalidInputError, match="holds 2 rows, and this batch has 1"):
        ours.generate(text[:1], attention_mask=mask[:1], **cache_option(cache), max_new_tokens=3)
    text, mask = text_and_cache("gpt2", 1, cache := DynamicCache())
    with pytest.raises(InvalidInputError, match="same model"):
        ours.generate(text, attention_mask=mask, **cache_option(cache), max_new_tokens=3)


def test_static_cache_may_be_passed_or_asked_for() -> None:
    ours = generator()
    inputs = ragged_prompts(2)
    expected = ours.model.generate(**inputs, do_sample=False, max_new_tokens=12)
    cache = StaticCache(config=ours.model.config, max_cache_len=64)
    assert torch.equal(
        ours.generate(**inputs, do_sample=False, max_new_tokens=12, **cache_option(cache)), expected
    )
    assert int(cache.get_seq_length()) == expected.shape[1] - 1
    out = ours.generate(**inputs, do_sample=False, max_new_tokens=12, cache_implementation="static")
    assert torch.equal(out, expected)


def test_without_cache() -> None:
    check(GREEDY, use_cache=False)


def test_cache_that_holds_the_whole_prompt_already() -> None:
    ours = generator()
    cache = DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 1, cache)
    length = cache.get_seq_length()
    with pytest.raises(InvalidInputError, match=f"{CACHE_NAME} holds"):
        ours.generate(
            text[:, :length],
            attention_mask=mask[:, :length],
            **cache_option(cache),
            max_new_tokens=3,
        )
