"""The trial of a model before its use: faults that it finds, and rounding that it tolerates."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hf_slospec import SLOSpecGenerator, UnsupportedModelError
from hf_slospec.config import SLOSpecConfig
from hf_slospec.model import tree_mask, trial
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.packed_model import PackedModel
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import (
    FAMILIES,
    assert_same_as_stock,
    ragged_prompts,
    tiny_model,
)

chain_and_tree = trial.chain_and_tree
tree_after_chain = tree_mask.tree_after_chain


def siblings_see_each_other(chain_len, tree):
    mask, offsets = tree_after_chain(chain_len, tree)
    return np.tri(len(mask), dtype=np.bool_), offsets


def positions_by_slot(chain_len, tree):
    mask, offsets = tree_after_chain(chain_len, tree)
    return mask, np.arange(len(offsets))


@pytest.mark.parametrize("fault", [siblings_see_each_other, positions_by_slot])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_wrong_masks_and_positions_are_found(monkeypatch, fault, family):
    monkeypatch.setattr(tree_mask, "tree_after_chain", fault)
    with pytest.raises(UnsupportedModelError, match="trial tree"):
        SLOSpecGenerator(tiny_model(family))


def test_a_fault_in_one_sequence_only_is_found(monkeypatch):
    def wrong_token(packed, sequence, chain, tree):
        new = chain_and_tree(packed, sequence, chain, tree)
        new.input_ids = new.input_ids + (sequence.start > 0)
        return new

    monkeypatch.setattr(trial, "chain_and_tree", wrong_token)
    with pytest.raises(UnsupportedModelError, match="trial tree"):
        SLOSpecGenerator(tiny_model("llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_does_not_fail_the_trial(family, dtype):
    SLOSpecGenerator(copy.deepcopy(tiny_model(family)).to(dtype))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_autocast_keeps_k_and_v_of_different_dtypes(family):
    with torch.autocast("cpu", torch.bfloat16):
        generator = SLOSpecGenerator(tiny_model(family), tiny_model(family, noise=0.03))
        generator.generate(**ragged_prompts(2), do_sample=False, max_new_tokens=12)
    assert_same_as_stock(
        generator.model, generator.generate, ragged_prompts(2), do_sample=False, max_new_tokens=12
    )


def test_dropout_is_off_in_the_trial_and_every_mode_is_restored():
    model = copy.deepcopy(tiny_model("gpt2"))
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    assert any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    SLOSpecGenerator(model)
    assert [module.training for module in model.modules()] == before


def test_running_out_of_memory_says_nothing_about_the_model(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model, "forward", exhausted)
    monkeypatch.setattr(model, "per_token", True, raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        SLOSpecGenerator(model)


def test_a_check_takes_few_forwards(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    shapes = []
    forward = model.forward

    @functools.wraps(forward)
    def counted(**inputs: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(model, "per_token", True, raising=False)
    CheckedModel(model, SLOSpecConfig(), measure_s=0.0)
    probes, ours = (
        [(1, 1)] * 2,
        [(1, 4 + 129), (1, 7)],
    )  # the packed prompts without their last tokens, and both trees
    plain = [
        (1, 5),
        (1, 1),
        (1, 5),
        (1, 1),
        (1, 1),
        (1, 130),
        (1, 1),
        (1, 1),
    ]  # a path to each leaf
    assert shapes == probes + ours + plain


def test_states_alone_are_held_to_the_tolerance_of_the_weights():
    """Such a model caches no K and V whose dtype would tell."""
    config = tiny_config(transformers.Mamba2Config)
    torch.manual_seed(0)
    packed = PackedModel(transformers.Mamba2ForCausalLM(config).eval().bfloat16())
    assert not packed.layers
    trial.check_by_trial(packed)
