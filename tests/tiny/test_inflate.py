"""Inflation changes the cost of a model and not its output."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import load_tiny_pair, tiny_prompts
from hf_slospec.tiny.inflate import Shape, inflate


@pytest.mark.parametrize("shape", [Shape(256, 704, 10), Shape(256, 1024, 8), Shape(512, 704, 8), Shape(1024, 1024, 9)])
def test_inflated_target_says_the_same(shape: Shape) -> None:
    target, _, tokenizer = load_tiny_pair(torch.float32)
    larger = inflate(target, shape)
    assert larger.num_parameters() > target.num_parameters()
    inputs = tokenizer(tiny_prompts()[:2], return_tensors="pt", padding=True)
    with torch.no_grad():
        ours, theirs = larger(**inputs).logits, target(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-3, atol=1e-3)
    options = dict(do_sample=False, max_new_tokens=16)
    assert torch.equal(larger.generate(**inputs, **options), target.generate(**inputs, **options))


@pytest.mark.parametrize("shape", [Shape(300, 704, 8), Shape(128, 704, 8), Shape(256, 500, 8), Shape(256, 704, 4)])
def test_shapes_that_cannot_hold_the_model(shape: Shape) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        inflate(load_tiny_pair()[0], shape)
