"""Prompts: shapes that are taken as stock takes them, and those that are refused."""

from __future__ import annotations

import torch

from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import ragged_prompts


def test_one_dimensional_ids_and_positional_inputs(model):
    ids = ragged_prompts(1)["input_ids"]
    expected = type(model).generate(model, ids, **OPTIONS)
    assert torch.equal(model.generate(ids[0], **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(model.generate(ids, **OPTIONS, slo_tpot=0.1), expected)
    assert torch.equal(
        model.generate(inputs=ids, attention_mask=torch.ones_like(ids), **OPTIONS, slo_tpot=0.1),
        expected,
    )
