"""Models from disk: what is missing, left over or not finite is refused by name, wherever a
checkpoint is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig

from hf_slospec import (
    InvalidInputError,
    SLOSpecGenerator,
    UnsupportedModelError,
    enable,
    load_drafter,
)
from hf_slospec.model.loading import load_model
from hf_slospec.server.loading import load_models
from hf_slospec.server.model_options import ModelOptions
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.toys.tiny_gemma4 import tiny_assistant, tiny_target
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level

LAYER = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def without_layer(tensors):
    del tensors[LAYER]


def with_more(tensors):
    tensors["extra.weight"] = torch.ones(2)


def with_value(value, tensors):
    tensors[LAYER][1, 1] = value


FAULTS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "missing": (
        without_layer,
        f"not a whole LlamaForCausalLM: it lacks {LAYER}, which would be random",
    ),
    "unexpected": (with_more, r"it has extra\.weight, which this class leaves out"),
    "nan": (functools.partial(with_value, torch.nan), f"NaN or infinite weights, in {LAYER}"),
    "inf": (functools.partial(with_value, torch.inf), f"NaN or infinite weights, in {LAYER}"),
}


def saved(folder, change=None):
    """A folder with a model, its tokenizer and some changes to its tensors."""
    tiny_model("llama").save_pretrained(folder)
    byte_level(101).save_pretrained(folder)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_checkpoints_with_faults_are_refused_everywhere(fault, tmp_path):
    change, message = FAULTS[fault]
    whole = saved(tmp_path / "whole")
    broken = saved(tmp_path / "broken", change)
    refused: list[Callable[[], Any]] = [
        lambda: SLOSpecGenerator.from_pretrained(broken),
        lambda: SLOSpecGenerator.from_pretrained(whole, broken),
        lambda: SLOSpecGenerator.from_pretrained(whole, drafter=broken),
        lambda: load_models(ModelOptions(target=broken, drafter="lookup")),
        lambda: load_models(ModelOptions(target=whole, assistant=broken)),
        lambda: load_drafter(broken, tiny_model("llama")),
    ]
    for load in refused:
        with pytest.raises((UnsupportedModelError, InvalidInputError), match=message):
            load()


@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_missing_and_unexpected_tensors_may_be_insisted_on(fault, tmp_path):
    broken = saved(tmp_path, FAULTS[fault][0])
    assert SLOSpecGenerator.from_pretrained(broken, allow_missing=True).model.num_parameters()
    assert load_models(
        ModelOptions(target=broken, drafter="lookup", allow_missing=True)
    ).target.num_parameters()
    with pytest.raises(UnsupportedModelError, match="allow_missing=True"):
        load_model(AutoModelForCausalLM, broken)


def test_tied_weights_are_not_missing(tmp_path):
    model: Any = tiny_model("gpt2")
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        load_model(AutoModelForCausalLM, str(tmp_path)).lm_head.weight, model.lm_head.weight
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loaded_model_with_such_weights_is_refused_by_name(value, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        saved(tmp_path, functools.partial(with_value, value))
    )
    with pytest.raises(UnsupportedModelError, match=f"NaN or infinite weights, in {LAYER}"):
        enable(model)


@pytest.mark.parametrize("unified", [False, True])
def test_gemma4_assistants_load_from_disk(unified, tmp_path):
    target = tiny_target(unified=unified)
    folder = str(tmp_path)
    tiny_assistant(unified=unified).save_pretrained(folder)
    configs = Gemma4TextConfig, Gemma4UnifiedTextConfig
    before = [vars(config)["kv_sharing_modes"] for config in configs]
    method = load_drafter(folder, target)
    assert [
        vars(config)["kv_sharing_modes"] for config in configs
    ] == before  # nothing stays patched
    assert method.kind == "Gemma 4 assistant"
    ours = SLOSpecGenerator(target, drafter=method, config=DRAFTS_ALWAYS)
    out = assert_same_as_stock(
        target, ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=8
    )
    assert sum(metrics.drafted for metrics in out.slo) > 0
