"""RoPE whose frequencies depend on the length of the text, beside the rows of
tests/generate/test_equals_stock.py.
"""

from __future__ import annotations

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from tests.support.stock_matrix import ALWAYS, forget_length, model_of, padded, random_texts
from tests.support.toys.tiny_models import assert_same_as_stock

BELOW = (10, 12, 14)
CROSSING = (20, 26, 31)
ABOVE = (40, 50, 33)
NEW = 16


def generator_of(name):
    return SLOSpecGenerator(model_of(name), config=SLOSpecConfig(**ALWAYS))


def prompts(lengths):
    return padded(random_texts(*lengths))


def test_stock_keeps_its_own_frequencies():
    generator = generator_of("llama-dynamic-rope")
    forget_length(generator.model)
    rotary = generator.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    generator.generate(**prompts(ABOVE), do_sample=False, max_new_tokens=4)
    assert torch.equal(rotary.inv_freq, before) and "forward" not in vars(rotary)


def test_texts_that_stock_computes_anew_are_refused():
    generator = generator_of("phi3-longrope")
    with pytest.raises(
        UnsupportedOptionError,
        match=r"longrope RoPE changes beyond 32 tokens.*max_new_tokens to at most 1",
    ):
        generator.generate(**prompts(CROSSING), do_sample=False, max_new_tokens=NEW)
    with generator, pytest.raises(UnsupportedOptionError, match="longrope"):
        generator.submit([5] * 30, max_new_tokens=NEW)


def test_rotary_embeddings_that_cannot_be_told():
    generator = generator_of("llama-longrope")
    generator.decoder.speculator.target.packed.rope.modules.clear()
    with pytest.raises(UnsupportedOptionError, match=r"longrope RoPE changes.*has a rope_type"):
        generator.generate(**prompts(ABOVE), do_sample=False, max_new_tokens=NEW)
    assert_same_as_stock(
        generator.model, generator.generate, prompts(BELOW), do_sample=False, max_new_tokens=NEW
    )
