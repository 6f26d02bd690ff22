"""Caches passed in and handed back: stock and ours over several turns."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_slospec import InvalidInputError, UnsupportedOptionError
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.support.against_stock import generator
from tests.support.toys.tiny_models import ragged_prompts, tiny_model


def text_and_cache(family, batch, cache):
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


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # transformers' own
@pytest.mark.parametrize("name", sorted({CACHE_NAME, "past_key_values"}))
def test_a_cache_by_both_of_its_names(name):
    ours = generator("llama")
    cache = DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 1, cache)
    options = dict(attention_mask=mask, do_sample=False, eos_token_id=None, max_new_tokens=10)
    expected = ours.model.generate(text, **options)
    assert torch.equal(ours.generate(text, **options, **{name: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    with pytest.raises(InvalidInputError, match=f"{CACHE_NAME} holds"):
        ours.generate(text, **options, **{name: cache})
    with pytest.raises(UnsupportedOptionError, match=f"{name} and use_cache=False contradict"):
        ours.generate(text, **options, use_cache=False, **{name: cache})


def test_cache_of_another_batch_or_model():
    ours = generator()
    cache = DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 2, cache)
    with pytest.raises(InvalidInputError, match="holds 2 rows, and this batch has 1"):
        ours.generate(text[:1], attention_mask=mask[:1], **cache_option(cache), max_new_tokens=3)
    text, mask = text_and_cache("gpt2", 1, cache := DynamicCache())
    with pytest.raises(InvalidInputError, match="same model"):
        ours.generate(text, attention_mask=mask, **cache_option(cache), max_new_tokens=3)
