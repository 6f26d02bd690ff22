"""Fused layers, run by Triton's interpreter, against the model's own."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import CohereConfig, CohereForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_slospec.cuda import fused_layers as layers
from hf_slospec.cuda.fused_kernels import GELU_TANH, SILU, gated_activation, rms_norm, rotate
from tests.cuda.parity import assert_same_up_to_rounding, fused_layers, half
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu"
)


@pytest.fixture
def _on_cpu(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")


def places(fused):
    return {f"{place[0].__name__.split('.')[-1]}.{place[1]}" for place in fused.attributes}


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_as_the_models_do(norm, dtype):
    own = norm(40).to(dtype)
    torch.nn.init.normal_(own.weight)
    states = torch.randn(2, 3, 40).to(dtype)
    found = rms_norm(states, own.weight, 1e-6, norm is Gemma2RMSNorm)
    torch.testing.assert_close(found, own(states), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_rotary_embeddings_are_equal_bit_by_bit():
    query, key = (
        torch.randn(1, 5, heads, 12, dtype=torch.float16).transpose(1, 2) for heads in (4, 2)
    )
    cos, sin = torch.randn(2, 1, 5, 12, dtype=torch.float16)  # the interpreter truncates to bf16
    for found, right in zip(
        rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True
    ):
        assert found.equal(right)


@pytest.mark.parametrize(
    ("activation", "function"),
    [(SILU, F.silu), (GELU_TANH, functools.partial(F.gelu, approximate="tanh"))],
)
def test_gated_activations(activation, function):
    gate, up = torch.randn(2, 3, 700, dtype=torch.bfloat16)
    torch.testing.assert_close(
        gated_activation(gate, up, activation), function(gate) * up, rtol=0.016, atol=1e-6
    )


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_models_compute_the_same_up_to_rounding(family):
    model = half(family)
    fused = fused_layers(model)
    assert {name.split(".")[-1] for name in places(fused)} == {"forward", layers.ROTARY}
    assert len(fused.attributes) == 3
    assert_same_up_to_rounding(model, fused)


@pytest.mark.usefixtures("_on_cpu")
def test_layers_that_compute_something_else_are_not_fused():
    """Cohere rotates neighbours, not halves; its norm subtracts the mean."""
    sizes = dict(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    cohere = CohereForCausalLM(CohereConfig(**sizes)).to(torch.bfloat16)
    assert places(fused_layers(cohere)) == {"CohereMLP.forward"}
    assert not fused_layers(half("gpt2")).attributes


@pytest.mark.usefixtures("_on_cpu")
def test_layers_that_differ_from_others_of_their_class_are_not_fused():
    model = half("llama")
    other = model.model.layers[0].mlp
    states = torch.randn(1, 2, 32, dtype=torch.bfloat16)
    other.act_fn = torch.nn.ReLU()
    model.model.norm.weight.data.fill_(torch.nan)
    plain = other(states)
    fused = fused_layers(model)
    with fused.in_force():
        assert other(states).equal(plain)
    assert "LlamaRMSNorm.forward" not in places(fused)


def test_nothing_is_fused_on_cpus_in_fp32_or_if_not_wanted(monkeypatch):
    assert not fused_layers(half("llama")).attributes
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    assert not fused_layers(half("llama"), False).attributes
    assert not fused_layers(tiny_model("llama")).attributes
