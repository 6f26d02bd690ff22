"""Inflation changes the cost of a model and not its output."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_slospec import (
    InvalidInputError,
    SLOSpecConfig,
    SLOSpecGenerator,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.tiny.inflate import config_of, inflate
from hf_slospec.tiny.shapes import DRAFT_SHAPES, SHAPES, Shape

LLAMA = dict(
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, vocab_size=5000
)  # as in Llama 3, all but the sizes
ONE_SIZE = (
    Shape(256, 704, 10),
    Shape(256, 1024, 8),
    Shape(512, 704, 8),
)  # only one of them is another


@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(own, marks=pytest.mark.nightly) for own in ONE_SIZE),
        Shape(1024, 1024, 9),
        Shape(256, 704, 8, num_attention_heads=16, num_key_value_heads=4),
        Shape(256, 704, 8, head_dim=192),
        pytest.param(Shape(1024, 704, 8, **LLAMA), marks=pytest.mark.nightly),
        Shape(1024, 704, 9, **LLAMA, tie_word_embeddings=False),
    ],
)
def test_inflated_target_says_the_same(shape):
    target, _, tokenizer = load_tiny_pair(torch.float32)
    larger = inflate(target, shape)
    assert larger.num_parameters() > target.num_parameters()
    inputs = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True)
    with torch.no_grad():
        ours = larger(**inputs).logits
        theirs = target(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert (
        ours.shape[-1] == larger.config.vocab_size == larger.get_input_embeddings().num_embeddings
    )
    ours, more = ours[real].split([theirs.shape[-1], ours.shape[-1] - theirs.shape[-1]], dim=-1)
    torch.testing.assert_close(ours, theirs[real], rtol=1e-3, atol=1e-3)
    assert more.isfinite().all() and (more < -100.0).all()
    options = dict(do_sample=False, max_new_tokens=16)
    assert torch.equal(larger.generate(**inputs, **options), target.generate(**inputs, **options))


def test_shapes_of_the_8b_pair():
    """Weights of 8.03 and 1.24 billion parameters, and 131 kB of K/V per token, as the models of
    these names have.
    """
    pair = load_tiny_pair(torch.bfloat16)[:2]
    shapes = SHAPES["8B"], DRAFT_SHAPES["8B"]
    with torch.device("meta"):
        larger = [LlamaForCausalLM(config_of(*each)) for each in zip(pair, shapes, strict=True)]
    assert [round(model.num_parameters() / 1e9, 2) for model in larger] == [8.03, 1.24]
    config = larger[0].config
    assert config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 2 == 131072


def test_an_inflated_pair_accepts_as_the_embedded_pair():
    target, draft, tokenizer = load_tiny_pair()
    inputs = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    config = SLOSpecConfig(policy="fixed", max_depth=4, max_width=2)
    larger = inflate(target, Shape(1024, 704, 8, **LLAMA, tie_word_embeddings=False))
    larger_draft = inflate(draft, Shape(512, 352, 3, 16, 4, 64, 5000))
    plain, inflated = (
        SLOSpecGenerator(*pair, tokenizer, config).generate(
            **inputs, do_sample=False, max_new_tokens=24, return_dict_in_generate=True
        )
        for pair in ((target, draft), (larger, larger_draft))
    )
    assert torch.equal(plain.sequences, inflated.sequences)
    assert [m.acceptance_length for m in plain.slo] == [m.acceptance_length for m in inflated.slo]
    assert plain.slo[0].acceptance_length > 1.5


@pytest.mark.parametrize(
    "shape",
    [
        Shape(300, 704, 8),
        Shape(128, 704, 8),
        Shape(256, 500, 8),
        Shape(256, 704, 4),
        Shape(256, 704, 8, head_dim=96),
        Shape(256, 704, 8, num_attention_heads=4, num_key_value_heads=4),
        Shape(256, 704, 8, num_attention_heads=4, num_key_value_heads=1),
        Shape(256, 704, 8, vocab_size=4096),
        Shape(512, 704, 8, vocab_size=1024),
    ],
)
def test_shapes_that_cannot_hold_the_model_are_refused(shape):
    with pytest.raises(InvalidInputError, match="cannot hold"):
        inflate(load_tiny_pair()[0], shape)
