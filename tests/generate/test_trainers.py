"""Calls as trainers and evaluation harnesses make them."""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import GenerationConfig, pipeline

import hf_slospec
from hf_slospec import FallbackWarning, SLOSpecConfig, UnsupportedModelError
from hf_slospec.generate.call import Decoder
from tests.support.forced_kernels import WORKING, force_kernel
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy, tiny_model

KERNELS = [name for name, dtype in WORKING if dtype is torch.bfloat16]


@pytest.fixture(params=["packed", "plain"])
def _kernel(request, monkeypatch):
    if request.param == "packed" and not KERNELS:
        pytest.skip("no kernels for bf16 on this machine")
    force_kernel(monkeypatch, KERNELS[0] if request.param == "packed" else "none")


def model_in_training():
    return tiny_copy("llama").train()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("is_enabled_first", [True, False])
def test_autocast_within_the_forward(is_enabled_first):
    model = model_in_training()
    draft = tiny_model("llama", noise=0.02)
    if is_enabled_first:
        hf_slospec.enable(model, draft, config=SLOSpecConfig(max_depth=3), always=True)
        model.generate(**ragged_prompts(2), max_new_tokens=4)
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    if not is_enabled_first:
        hf_slospec.enable(model, draft, config=SLOSpecConfig(max_depth=3), always=True)
    decoder = model.generate.decoder
    for _ in range(2):
        report = hf_slospec.divergence_report(
            model, ragged_prompts(4), max_new_tokens=24, do_sample=False
        )
        assert report.all_near_ties and report.dtype is torch.bfloat16, str(report)
        packed = decoder.speculator.target.packed
        assert packed.autocast is torch.bfloat16
        copies = [one for layer in packed.overrides.layers.values() for one in layer.copies]
        assert {one.autocast for one in copies} <= {torch.bfloat16}
        for parameter in model.parameters():
            parameter.data.mul_(1.01)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("dtype", "paths"), [(torch.bfloat16, ["compiled", "eager"]), (torch.float32, ["eager"])]
)
def test_autocast_that_converts_no_weight_does_not_prevent_compiling(dtype, paths):
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny_copy("llama").to(dtype))
    hf_slospec.enable(model, always=True)
    packed = model.generate.decoder.speculator.target.packed
    assert [path.name for path in packed.paths] == paths
    report = hf_slospec.divergence_report(
        model, ragged_prompts(2), max_new_tokens=12, do_sample=False
    )
    assert report.all_near_ties and report.dtype is torch.bfloat16, str(report)


def test_a_model_whose_buffers_are_cast_is_prepared_anew():
    model = tiny_copy("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    hf_slospec.enable(model, always=True)
    checked = model.generate.decoder.speculator.target
    for is_cast in (False, True):
        packed = checked.packed
        report = hf_slospec.divergence_report(
            model, ragged_prompts(2), max_new_tokens=12, do_sample=False
        )
        assert report.all_near_ties and checked.packed is packed, str(report)
        model.to(torch.bfloat16)  # TRL does so before each generate_batch
        checked.renew(checked.lock)
        assert (checked.packed is packed) == is_cast


@pytest.mark.usefixtures("_process_group")
def test_a_model_split_after_it_was_enabled_is_refused_by_name():
    from torch.distributed.fsdp import fully_shard

    model = model_in_training().eval()
    hf_slospec.enable(model, always=True)
    fully_shard(model)
    with pytest.raises(UnsupportedModelError, match="split over processes"):
        model.generate(**ragged_prompts(1), max_new_tokens=4)


@pytest.fixture
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_dropout_of_adapters_is_refused_with_a_remedy_or_falls_back():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model_in_training(), lora).train()
    hf_slospec.enable(model, always=True)
    with pytest.raises(
        UnsupportedModelError, match=r"lora_dropout.*LoraConfig\(lora_dropout=0.0\)"
    ):
        model.generate(**ragged_prompts(1), max_new_tokens=4)
    hf_slospec.enable(model, always=True, fallback=True)
    with pytest.warns(FallbackWarning, match="dropout"):
        model.generate(**ragged_prompts(1), max_new_tokens=4)


def test_gradient_checkpointing_is_refused_by_name():
    model = model_in_training()
    model.activation_checkpointing_enable()
    hf_slospec.enable(model.eval(), always=True)
    model.train()
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing"):
        model.generate(**ragged_prompts(1), max_new_tokens=4)
    model.eval()
    assert model.generate(**ragged_prompts(1), max_new_tokens=4) is not None


def test_what_stock_ignores_is_ignored_and_nothing_warns():
    model = tiny_copy("llama")
    inputs = ragged_prompts(2)
    config = GenerationConfig(max_new_tokens=6, do_sample=False)
    expected = model.generate(**inputs, labels=inputs["input_ids"], generation_config=config)
    hf_slospec.enable(model, always=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(
            model.generate(**inputs, labels=inputs["input_ids"], generation_config=config), expected
        )
        config.prompt_lookup_num_tokens = 3
        assert torch.equal(model.generate(**inputs, generation_config=config), expected)
    assert config.prompt_lookup_num_tokens == 3


@pytest.mark.parametrize("slo_tpot", [None, 0.05])
def test_pipelines_speculate(slo_tpot, monkeypatch):
    model, draft, tokenizer = (copy.deepcopy(part) for part in hf_slospec.load_tiny_pair())
    model.float(), draft.float()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["def main():\n", "import os\n", "class Stack:\n"]
    options = dict(max_new_tokens=24, do_sample=True, return_full_text=False, batch_size=2)
    torch.manual_seed(0)
    expected = pipe(prompts, **options)
    hf_slospec.enable(model, draft, always=slo_tpot is None)
    calls = []
    decode = Decoder.generate
    monkeypatch.setattr(
        Decoder, "generate", lambda self, *given: calls.append(given[0]) or decode(self, *given)
    )
    torch.manual_seed(0)
    assert (
        pipe(prompts, **options, **({} if slo_tpot is None else {"slo_tpot": slo_tpot})) == expected
    )
    assert calls == [slo_tpot] * 2
