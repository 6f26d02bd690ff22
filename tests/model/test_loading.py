"""Models as people load them: other dtypes, adapters, quantised weights, offloaded layers, padded
vocabularies.
"""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import disk_offload, dispatch_model

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidTypeError,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.stock_matrix import with_lora
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

# peft still asks transformers by the old name
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def test_vocabularies_of_different_tokenizers():
    target, _, _ = hf_slospec.load_tiny_pair()  # 2,048 tokens
    with pytest.raises(IncompatibleDraftError, match="vocabulary of 101 tokens"):
        SLOSpecGenerator(target, tiny_model("llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_target_of_another_dtype(dtype):
    """Reduced precision rounds packed and single forwards differently: there, tokens differ at
    near-ties only.
    """
    target = copy.deepcopy(tiny_model("llama")).to(dtype)
    ours = SLOSpecGenerator(target, tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS)
    report = hf_slospec.divergence_report(
        ours, ragged_prompts(3), do_sample=False, max_new_tokens=24
    )
    assert report.all_near_ties, report


# ---------------------------------------------------------------- accelerate


@pytest.mark.parametrize("offloads", ["target", "both"])
def test_layers_on_disk(tmp_path, offloads):
    target, draft = (
        copy.deepcopy(tiny_model("qwen2")),
        copy.deepcopy(tiny_model("qwen2", noise=0.03)),
    )
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    device_map |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")
    dispatch_model(
        target, device_map, main_device="cpu", offload_dir=tmp_path / "target", force_hooks=True
    )
    if offloads == "both":
        disk_offload(draft, tmp_path / "draft", execution_device=torch.device("cpu"))
    assert any(parameter.device.type == "meta" for parameter in target.parameters())
    ours = SLOSpecGenerator(target, draft, config=DRAFTS_ALWAYS)
    out = assert_same_as_stock(
        target, ours.generate, ragged_prompts(2), do_sample=True, max_new_tokens=10
    )
    assert sum(metrics.drafted for metrics in out.slo)


# ---------------------------------------------------------------- adapters and quantised weights


def test_enabling_a_peft_model_and_what_it_wraps():
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=24)
    model = with_lora(copy.deepcopy(tiny_model("llama")))
    expected = model.generate(**inputs, **options)
    for enabled in (model, model.get_base_model()):
        hf_slospec.enable(enabled, tiny_model("llama", noise=0.03))
        out = model.generate(**inputs, **options, slo_tpot=0.1, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected) and len(out.slo) == 2
        hf_slospec.disable(enabled)
    assert "generate" not in model.get_base_model().__dict__
    with model.disable_adapter():
        assert not torch.equal(model.generate(**inputs, **options), expected)


def test_compiled_models_are_refused_by_what_was_done_to_them():
    whole = copy.deepcopy(tiny_model("llama"))
    part = copy.deepcopy(tiny_model("llama"))
    with pytest.raises(InvalidTypeError, match="assistant_model is a compiled model"):
        SLOSpecGenerator(whole, torch.compile(part, backend="eager"))
    part.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="was compiled"):
        SLOSpecGenerator(part)


def test_prompt_learning_adapters_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        SLOSpecGenerator(peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config))


def test_one_adapter_per_row_is_refused_before_peft_hooks_the_layers():
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=8)
    model = with_lora(copy.deepcopy(tiny_model("llama")))
    names = ["default", "__base__"]
    expected = model.generate(**inputs, **options, adapter_names=names)
    hf_slospec.enable(model, tiny_model("llama"))
    assert torch.equal(model.generate(**inputs, **options, adapter_names=names), expected)
    with pytest.raises(UnsupportedOptionError, match="adapter_names"):
        model.generate(**inputs, **options, adapter_names=names, slo_tpot=0.1)
    with pytest.warns(FallbackWarning, match="adapter_names"):
        out = model.generate(**inputs, **options, adapter_names=names, slo_tpot=0.1, fallback=True)
    assert torch.equal(out, expected)
    model.generate(**inputs, **options, slo_tpot=0.1)
    hf_slospec.disable(model)
    assert "generate" not in model.__dict__
