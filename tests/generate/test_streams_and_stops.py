"""Streamers, stopping and processors of calls with an SLO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import hf_slospec
from hf_slospec import (
    SLOSpecGenerator,
)
from tests.support.enabled_model import OPTIONS, with_slo
from tests.support.streamers import Recorder
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts


@pytest.mark.parametrize("batch", [1, 4])
def test_streamer_sees_what_stock_streams(model: Any, batch: int) -> None:
    inputs = ragged_prompts(batch)
    stock = Recorder()
    ours = Recorder()
    type(model).generate(model, **inputs, do_sample=False, max_new_tokens=50, streamer=stock)
    model.generate(**inputs, do_sample=False, max_new_tokens=50, streamer=ours, slo_tpot=0.1)
    assert ours.puts == stock.puts
    assert ours.puts.count([]) == 1 and not ours.puts[-1]  # one end, behind all tokens


@pytest.mark.parametrize("as_config", [False, True])
def test_stop_strings_end_at_the_token_that_completes_them(as_config: bool) -> None:
    target, draft, tokenizer = hf_slospec.load_tiny_pair()
    inputs = dict(tokenizer(["def __init__(self"], return_tensors="pt"))
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=60, stop_strings=["self.", "):"])
    if as_config:
        options = dict(
            generation_config=GenerationConfig(**options, eos_token_id=0, pad_token_id=1)
        )
    expected = target.generate(**inputs, **options, tokenizer=tokenizer)
    assert inputs["input_ids"].shape[1] < expected.shape[1] < inputs["input_ids"].shape[1] + 60
    generator = SLOSpecGenerator(target, draft, tokenizer)
    assert torch.equal(generator.generate(**inputs, **options, slo_tpot=0.1), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        hf_slospec.enable(target, draft).generate(**inputs, **options, slo_tpot=0.1)


def test_prefix_constraint_sees_its_own_row(model: Any) -> None:
    def allowed(row: int, _: torch.Tensor) -> list[int]:
        return list(range(10 + 20 * row, 30 + 20 * row))

    assert_same_as_stock(
        model, with_slo(model), ragged_prompts(3), **OPTIONS, prefix_allowed_tokens_fn=allowed
    )


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_run_leaves_the_model_usable(
    model: Any, interruption: type[BaseException]
) -> None:
    class Interrupting(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 6:
                raise interruption

    inputs = ragged_prompts(1, seed=5)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    with pytest.raises(interruption):
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1, streamer=Interrupting())
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert torch.equal(model.generate(**inputs, **OPTIONS, slo_tpot=0.1), expected)


def test_criteria_may_return_a_plain_bool(model: Any) -> None:
    out = model.generate(
        **ragged_prompts(1), max_new_tokens=20, do_sample=False, slo_tpot=0.1,
        stopping_criteria=[lambda input_ids, scores, **_: input_ids.shape[1] >= 26],
    )  # fmt: skip
    assert out.shape[1] <= 26


def test_stateful_processor_keeps_its_state_per_row(model: Any) -> None:
    watermark = WatermarkingConfig(bias=2.5)
    synth = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33], context_history_size=16)
    for config in (watermark, synth):
        assert_same_as_stock(
            model,
            with_slo(model),
            ragged_prompts(3),
            do_sample=True,
            max_new_tokens=16,
            watermarking_config=config,
        )
