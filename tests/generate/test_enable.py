"""Enable and disable: changes to a model, and that all of them are undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import hf_slospec
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import ragged_prompts, tiny_model


def test_without_target_generate_is_stock(model):
    inputs = ragged_prompts(2)
    out = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    assert not hasattr(out, "slo")
    assert torch.equal(out.sequences, type(model).generate(model, **inputs, **OPTIONS))


def test_always_speculates_without_target():
    model = hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), always=True)
    try:
        out = model.generate(**ragged_prompts(2), **OPTIONS, return_dict_in_generate=True)
        assert [metrics.tpot_slo_s for metrics in out.slo] == [None, None]
    finally:
        hf_slospec.disable(model)


def test_disable_restores_everything():
    model = tiny_model("qwen2")
    before = dict(model.__dict__), model.config.to_dict(), model.config._attn_implementation
    hf_slospec.enable(model, tiny_model("qwen2"))
    hf_slospec.enable(model, tiny_model("qwen2", seed=1))  # again: replaces the draft
    model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1)
    hf_slospec.disable(model)
    hf_slospec.disable(model)
    assert (
        dict(model.__dict__),
        model.config.to_dict(),
        model.config._attn_implementation,
    ) == before
    with pytest.raises(ValueError, match="slo_tpot"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1)


def test_plain_forwards_are_untouched_while_enabled(model):
    inputs = ragged_prompts(3)
    hf_slospec.disable(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        hf_slospec.enable(model, tiny_model("llama"))
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)
        assert torch.equal(model(**inputs).logits, expected)


def test_enabled_model_can_be_copied_and_pickled():
    # One of its own: where hidden states were asked for, transformers leaves hooks that cannot be
    # pickled.
    model = hf_slospec.enable(tiny_model.__wrapped__("llama"), tiny_model("llama", noise=0.03))
    inputs = ragged_prompts(2)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(**inputs, **OPTIONS), expected)
        with pytest.raises(ValueError, match="slo_tpot"):
            other.generate(**inputs, **OPTIONS, slo_tpot=0.1)
