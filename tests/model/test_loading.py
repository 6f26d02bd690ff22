"""Models as people load them: other dtypes, adapters, quantised weights, offloaded layers, padded
vocabularies.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidTypeError,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.model.properties import cache_option
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.breadth import quick_or
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import (
    FAMILIES,
    assert_same_as_stock,
    ragged_prompts,
    sharpened,
    tiny_model,
)

# peft still asks transformers by the old name
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
SAMPLED = dict(do_sample=True, top_k=30, temperature=0.8)
MODES: list[dict[str, Any]] = [SAMPLED, *quick_or([], [dict(do_sample=False)])]


def check(
    model: Any, draft: Any, batches: tuple[int, ...] = quick_or((3,), (1, 3)), **options: Any
) -> None:
    ours = SLOSpecGenerator(model, draft, config=DRAFTS_ALWAYS)
    for mode in MODES:
        for batch in batches:
            out = assert_same_as_stock(
                model,
                ours.generate,
                ragged_prompts(batch, seed=batch),
                **mode,
                max_new_tokens=quick_or(10, 16),
                **options,
            )
    assert sum(metrics.drafted for metrics in out.slo)


def resized(vocab_size: int, noise: float = 0.0) -> Any:
    """The tiny Llama with its vocabulary padded (or cut) to another size, as two models of one
    tokenizer differ.
    """
    name, settings = FAMILIES["llama"]
    model = LlamaForCausalLM(
        getattr(transformers, name)(**settings | dict(vocab_size=vocab_size))
    ).eval()
    state = copy.deepcopy(tiny_model("llama", noise=noise).state_dict())
    rows = min(vocab_size, 101)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        own = model.state_dict()[key].clone()
        own[:rows] = state[key][:rows]
        state[key] = own
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(("target_size", "draft_size"), [(101, 128), (128, 101), (101, 88)])
def test_vocabularies_padded_to_different_sizes(target_size: int, draft_size: int) -> None:
    check(resized(target_size), resized(draft_size, noise=0.03))


def test_vocabularies_of_different_tokenizers() -> None:
    target, _, _ = hf_slospec.load_tiny_pair()  # 2,048 tokens
    with pytest.raises(IncompatibleDraftError, match="vocabulary of 101 tokens"):
        SLOSpecGenerator(target, tiny_model("llama"))


def test_draft_may_propose_and_meet_ids_that_only_one_model_has() -> None:
    check(resized(128), resized(101, noise=0.03), eos_token_id=None, min_new_tokens=10)
    ours = SLOSpecGenerator(resized(128), resized(101, noise=0.03), config=DRAFTS_ALWAYS)
    inputs = {
        "input_ids": torch.tensor([[120, 5, 127, 9, 110]])
    }  # the draft has none of the large ones
    assert_same_as_stock(
        ours.model, ours.generate, inputs, do_sample=False, max_new_tokens=20, bad_words_ids=[[3]]
    )


def test_tied_embeddings() -> None:
    _, settings = FAMILIES["llama"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=True)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    check(model, tiny_model("llama"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_draft_of_another_dtype(dtype: torch.dtype) -> None:
    check(tiny_model("llama"), copy.deepcopy(tiny_model("llama", noise=0.03)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_target_of_another_dtype(dtype: torch.dtype) -> None:
    """Reduced precision rounds packed and single forwards differently: there, tokens differ at
    near-ties only.
    """
    target = copy.deepcopy(tiny_model("llama")).to(dtype)
    if dtype is torch.float64:
        return check(target, tiny_model("llama", noise=0.03))
    ours = SLOSpecGenerator(target, tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS)
    report = hf_slospec.divergence_report(
        ours, ragged_prompts(3), do_sample=False, max_new_tokens=24
    )
    assert report.all_near_ties, report
    return None


# ---------------------------------------------------------------- accelerate


def test_device_map_auto(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    check(model, tiny_model("llama", noise=0.03))


@pytest.mark.parametrize("offloads", ["target", "both"])
def test_layers_on_disk(tmp_path: Any, offloads: str) -> None:
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
    check(target, draft, batches=(2,))


def test_weights_offloaded_to_cpu() -> None:
    target = copy.deepcopy(tiny_model("gpt2"))
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in target.parameters())
    check(target, tiny_model("gpt2", noise=0.03), batches=(2,))


# ---------------------------------------------------------------- adapters and quantised weights


def adapted(family: str = "llama") -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = peft.get_peft_model(
        copy.deepcopy(tiny_model(family)),
        peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        ),
    )
    return model.eval()


def test_lora_adapter_on_the_target() -> None:
    model = adapted()
    plain = tiny_model("llama").generate(**ragged_prompts(2), do_sample=False, max_new_tokens=24)
    ours = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS)
    for mode in MODES:
        torch.manual_seed(1)
        expected = model.generate(**ragged_prompts(2), **mode, max_new_tokens=24)
        torch.manual_seed(1)
        assert torch.equal(ours.generate(**ragged_prompts(2), **mode, max_new_tokens=24), expected)
    assert not torch.equal(
        model.generate(**ragged_prompts(2), do_sample=False, max_new_tokens=24), plain
    )


def test_enabling_a_peft_model_and_what_it_wraps() -> None:
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=24)
    model = adapted()
    expected = model.generate(**inputs, **options)
    for enabled in (model, model.get_base_model()):
        hf_slospec.enable(enabled, tiny_model("llama", noise=0.03))
        out = model.generate(**inputs, **options, slo_tpot=0.1, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected) and len(out.slo) == 2
        hf_slospec.disable(enabled)
    assert "generate" not in model.get_base_model().__dict__
    with model.disable_adapter():
        assert not torch.equal(model.generate(**inputs, **options), expected)


def test_compiled_models_are_refused_by_what_was_done_to_them() -> None:
    whole = copy.deepcopy(tiny_model("llama"))
    part = copy.deepcopy(tiny_model("llama"))
    with pytest.raises(InvalidTypeError, match="assistant_model is a compiled model"):
        SLOSpecGenerator(whole, torch.compile(part, backend="eager"))
    part.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="was compiled"):
        SLOSpecGenerator(part)


def test_prompt_learning_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        SLOSpecGenerator(peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config))


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_quantised_linears(bits: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = (
        quantization.Int8WeightOnlyConfig()
        if bits == 8
        else quantization.IntxWeightOnlyConfig(torch.int4)
    )
    target = copy.deepcopy(tiny_model("llama"))
    quantization.quantize_(target, config)
    plain = tiny_model("llama")(torch.arange(3, 9)[None]).logits
    assert not torch.equal(target(torch.arange(3, 9)[None]).logits, plain)
    check(target, tiny_model("llama", noise=0.03))
    check(tiny_model("llama"), target)


def test_one_adapter_per_row_is_refused_before_peft_hooks_the_layers() -> None:
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=8)
    model = adapted()
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


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_second_turn_where_layers_share_k_and_v(family: str) -> None:
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = sharpened(lambda: model_class(tiny_config(model_class.config_class)), 0)
    ours = SLOSpecGenerator(model, model, config=DRAFTS_ALWAYS)
    texts = []
    for generate in (type(model).generate.__get__(model), ours.generate):
        cache = DynamicCache(config=model.config)
        text = ragged_prompts(1)["input_ids"]
        for turn in range(3):
            text = torch.cat((text, torch.full((1, 3), 5 + turn)), 1)
            mask = torch.ones_like(text)  # a text may hold the pad token
            options = dict(do_sample=False, max_new_tokens=9, eos_token_id=None)
            text = generate(text, attention_mask=mask, **cache_option(cache), **options)
        texts.append(text)
    assert torch.equal(*texts)
