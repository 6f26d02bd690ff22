"""Calls with ``token_type_ids``, which tokenizers of BERT return beside the tokens."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_slospec
from hf_slospec import FallbackWarning, UnsupportedOptionError
from tests.support.enabled_model import OPTIONS
from tests.support.stock_matrix import model_of
from tests.support.toys.tiny_models import ragged_prompts


def typed(batch, kind=0):
    inputs = ragged_prompts(batch)
    return inputs | {"token_type_ids": torch.full_like(inputs["input_ids"], kind)}


@pytest.mark.parametrize(("name", "kind"), [("gpt2", 0), ("CTRLLMHeadModel", 0), ("bert", 1)])
def test_types_that_change_what_the_model_computes_are_refused_by_name(name, kind):
    model = hf_slospec.enable(copy.deepcopy(model_of(name)))
    inputs = typed(1, kind)
    with pytest.raises(UnsupportedOptionError, match="token_type_ids"):
        model.generate(**inputs, **OPTIONS, slo_tpot=1.0)
    with pytest.warns(FallbackWarning, match="token_type_ids"):
        ours = model.generate(**inputs, **OPTIONS, slo_tpot=1.0, fallback=True)
    assert torch.equal(ours, model.generate(**inputs, **OPTIONS))
