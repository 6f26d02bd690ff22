"""Options and models that cannot be speculated: refused by name, or run by stock ``generate``."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import (
    FallbackWarning,
    UnsupportedModelError,
    UnsupportedOptionError,
    disable,
    enable,
)
from tests.support.against_stock import generator
from tests.support.streamers import Recorder
from tests.support.toys.tiny_models import ragged_prompts, tiny_model


def test_fallback_runs_stock_generate_and_says_so():
    model = enable(tiny_model("llama"), tiny_model("llama", noise=0.03), fallback=True)
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=6, num_beams=2)
    expected = type(model).generate(model, **inputs, **options)
    try:
        with pytest.warns(FallbackWarning, match="beam"):
            assert torch.equal(model.generate(**inputs, **options, slo_tpot=0.1), expected)
        with pytest.raises(UnsupportedOptionError, match="beam"):
            model.generate(**inputs, **options, slo_tpot=0.1, fallback=False)
    finally:
        disable(model)
    with pytest.warns(FallbackWarning, match="beam"):
        assert torch.equal(generator().generate(**inputs, **options, fallback=True), expected)


def test_fallback_for_a_model_that_cannot_hold_a_tree():
    from transformers import RwkvConfig, RwkvForCausalLM

    model = RwkvForCausalLM(RwkvConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2)).eval()
    inputs = {"input_ids": ragged_prompts(1)["input_ids"]}
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    with pytest.raises(UnsupportedModelError, match=r"RwkvForCausalLM .*keeps states"):
        enable(model)
    assert "generate" not in vars(model)
    enable(model, fallback=True)
    with pytest.warns(FallbackWarning, match="Rwkv"):
        assert torch.equal(
            model.generate(**inputs, do_sample=False, max_new_tokens=6, slo_tpot=0.1), expected
        )


def test_fallback_for_a_model_with_an_embedding_table_per_codebook():
    from transformers.models.moshi.modeling_moshi import MoshiDepthConfig, MoshiDepthDecoder

    config = MoshiDepthConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32, vocab_size=99, audio_vocab_size=40,
        input_size=32, num_codebooks=4,
    )  # fmt: skip
    model = MoshiDepthDecoder(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"MoshiDepthDecoder .*one table of all tokens"):
        enable(model)
    options = dict(
        input_ids=torch.tensor([[3], [5]]),
        last_hidden_state=torch.randn(2, 1, 32),
        max_new_tokens=3,
        do_sample=False,
    )
    expected = model.generate(**options)
    enable(model, fallback=True, always=True)
    with pytest.warns(FallbackWarning, match="one table of all tokens"):
        assert torch.equal(model.generate(**options), expected)


def test_fallback_does_not_stream_the_prompt_twice():
    inputs = ragged_prompts(1)
    streamer = Recorder()
    stock = Recorder()
    options = dict(
        do_sample=False, max_new_tokens=6, output_hidden_states=True, return_dict_in_generate=True
    )
    tiny_model("llama").generate(**inputs, **options, streamer=stock)
    with pytest.warns(FallbackWarning):
        generator(fallback=True).generate(**inputs, **options, streamer=streamer)
    assert streamer.puts == stock.puts
