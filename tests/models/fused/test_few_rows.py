"""Layers that one kernel computes for few rows, run by Triton's interpreter, against the model's own."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.models.fused import few_rows, layers
from hf_slospec.models.fused.few_row_kernels import MAX_ROWS, MIN_TILE_ROWS, gated_product, joint_products
from hf_slospec.models.fused.layers import FusedLayers
from hf_slospec.models.fused.triton_kernels import GELU_TANH, SILU
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu")
JOINT = (nn.Linear, "forward")


@pytest.fixture
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    monkeypatch.setattr(few_rows, "is_faster", lambda *_: True)


def half(family: str) -> Any:
    return copy.deepcopy(tiny_model(family)).to(torch.bfloat16)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).norm() <= 0.015 * expected.float().norm()


@pytest.mark.parametrize("num_rows", [1, 5, 17, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, (70, 10, 64)), (130, (64, 3)), (128, (129,))], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_by_several_weights(num_rows: int, inputs: int, outputs: tuple[int, ...], has_bias: bool) -> None:
    rows, weights = torch.randn(num_rows, inputs).bfloat16(), [torch.randn(n, inputs).bfloat16() for n in outputs]
    biases = [torch.randn(n).bfloat16() if has_bias else None for n in outputs]
    for out, weight, bias in zip(joint_products(rows, weights, biases), weights, biases, strict=True):
        assert_close(out, F.linear(rows.float(), weight.float(), None if bias is None else bias.float()))


@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize(
    ("activation", "function"), [(SILU, F.silu), (GELU_TANH, functools.partial(F.gelu, approximate="tanh"))]
)
def test_gated_products(num_rows: int, activation: int, function: Any) -> None:
    rows, gate, up = (torch.randn(n, 130).bfloat16() for n in (num_rows, 70, 70))
    gate /= 10
    assert_close(gated_product(rows, gate, up, activation), function(F.linear(rows, gate)) * F.linear(rows, up))


@pytest.mark.usefixtures("_faster")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_models_compute_the_same_up_to_rounding(family: str) -> None:
    model = half(family)
    fused = FusedLayers(model, True)
    assert JOINT in fused.attributes
    for length in (6, MIN_TILE_ROWS + 1, MAX_ROWS + 1):
        ids = torch.arange(length)[None] + 3
        plain = model(ids).logits
        with fused.in_use():
            found = model(ids).logits
        assert model(ids).logits.equal(plain)
        assert (found - plain).norm() < 0.03 * plain.norm()


@pytest.mark.usefixtures("_faster")
def test_one_kernel_for_three_layers_and_one_for_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = half("llama"), list[str]()
    fused = FusedLayers(model, True)
    plain = nn.functional.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: calls.append("linear") or plain(x, w, b))
    with fused.in_use():
        model(torch.arange(3, 9)[None])
    num_layers = model.config.num_hidden_layers
    assert len(calls) == 2 * num_layers + 1  # o_proj and down_proj of each layer, and the head


@pytest.mark.usefixtures("_faster")
def test_layers_asked_for_other_states_compute_those() -> None:
    model = half("llama")
    attention, (fused,) = model.model.layers[0].self_attn, [FusedLayers(model, True)]
    states, others = torch.randn(2, 1, 4, 32, dtype=torch.bfloat16)
    with fused.in_use():
        attention.q_proj(states)
        assert attention.k_proj(others).equal(attention.k_proj(others))
        assert_close(attention.k_proj(others), F.linear(others, attention.k_proj.weight))
        assert_close(attention.v_proj(states), F.linear(states, attention.v_proj.weight))
        transposed = torch.randn(1, 32, 4, dtype=torch.bfloat16).transpose(1, 2)
        assert_close(attention.q_proj(transposed), F.linear(transposed, attention.q_proj.weight))


@pytest.mark.usefixtures("_faster")
def test_hooks_of_joint_and_gated_layers_run() -> None:
    model, seen = half("llama"), list[str]()
    fused, layer = FusedLayers(model, True), model.model.layers[0]
    for module, name in ((layer.self_attn.k_proj, "k"), (layer.mlp.up_proj, "up")):
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    with fused.in_use():
        model(torch.arange(3, 9)[None])
    assert seen == ["k", "up"]


@pytest.mark.usefixtures("_faster")
def test_weights_that_change_count_at_once() -> None:
    model, ids = half("llama"), torch.arange(3, 9)[None]
    fused = FusedLayers(model, True)
    for parameter in model.model.layers[1].parameters():
        parameter.data.mul_(1.5)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, model.config.intermediate_size, dtype=torch.bfloat16)
    plain = model(ids).logits
    with fused.in_use():
        assert (model(ids).logits - plain).norm() < 0.03 * plain.norm()


def test_without_a_gain_layers_stay_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    for answer in (lambda *_: False, lambda *_: 1 // 0):  # slower, or it fails
        monkeypatch.setattr(few_rows, "is_faster", answer)
        assert JOINT not in FusedLayers(half("llama"), True).attributes


@pytest.mark.usefixtures("_faster")
def test_projections_of_other_classes_stay_separate() -> None:
    model = half("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj)
    assert JOINT not in FusedLayers(model, True).attributes


@pytest.mark.usefixtures("_faster")
def test_a_gated_layer_whose_output_is_zero_is_fused() -> None:
    """As those are that an inflated model has added."""
    model = half("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    assert any(owner.__name__ == "LlamaMLP" for owner, _ in FusedLayers(model, True).attributes)
