"""Calls with ``token_type_ids``, which tokenizers of BERT return beside the tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import hf_slospec
from hf_slospec import FallbackWarning, SLOSpecGenerator, UnsupportedOptionError
from tests.support.breadth import nightly_but
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import (
    SMALL,
    assert_same_as_stock,
    ragged_prompts,
    sharpened,
    tiny_model,
)

DECODER = SMALL | dict(is_decoder=True)
CLASSES = {
    "Bert": DECODER,
    "Roberta": DECODER,
    "Electra": DECODER | dict(embedding_size=32),
    "RoFormer": DECODER | dict(embedding_size=32, rotary_value=False),
    "RemBert": DECODER | dict(input_embedding_size=32, output_embedding_size=32),
}
CTRL = dict(
    vocab_size=101,
    n_embd=32,
    dff=48,
    n_layer=2,
    n_head=4,
    n_positions=160,
    pad_token_id=0,
    eos_token_id=2,
)


def model_of(name: str, settings: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{name}Config")(**settings)
    return sharpened(lambda: AutoModelForCausalLM.from_config(config), 0)


def typed(batch: int, kind: int = 0) -> dict[str, torch.Tensor]:
    inputs = ragged_prompts(batch)
    return inputs | {"token_type_ids": torch.full_like(inputs["input_ids"], kind)}


@pytest.mark.parametrize("name", nightly_but(["Bert", "Roberta"], list(CLASSES)))
def test_zeros_that_are_the_default_give_stocks_tokens(name: str) -> None:
    model = hf_slospec.enable(model_of(name, CLASSES[name]), always=True)
    assert_same_as_stock(model, model.generate, typed(1), **OPTIONS)
    sampled: dict[str, Any] = OPTIONS | dict(do_sample=True, num_return_sequences=2)
    assert_same_as_stock(model, SLOSpecGenerator(model).generate, typed(1), **sampled)


@pytest.mark.parametrize(
    "model", [tiny_model("gpt2"), model_of("CTRL", CTRL)], ids=["GPT2", "CTRL"]
)
def test_zeros_that_add_an_embedding_are_refused_by_name(model: Any) -> None:
    model = hf_slospec.enable(copy.deepcopy(model))
    inputs = typed(1)
    with pytest.raises(UnsupportedOptionError, match=r"token_type_ids .* change what .* computes"):
        model.generate(**inputs, **OPTIONS, slo_tpot=1.0)
    with pytest.warns(FallbackWarning, match="token_type_ids"):
        ours = model.generate(**inputs, **OPTIONS, slo_tpot=1.0, fallback=True)
    assert torch.equal(ours, model.generate(**inputs, **OPTIONS))


def test_other_types_are_refused_by_name() -> None:
    model = hf_slospec.enable(model_of("Bert", DECODER))
    inputs = typed(1, kind=1)
    with pytest.raises(UnsupportedOptionError, match="token_type_ids"):
        model.generate(**inputs, **OPTIONS, slo_tpot=1.0)
    with pytest.warns(FallbackWarning, match="token_type_ids"):
        ours = model.generate(**inputs, **OPTIONS, slo_tpot=1.0, fallback=True)
    assert torch.equal(ours, model.generate(**inputs, **OPTIONS))
