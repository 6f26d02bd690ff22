"""Layers that one kernel computes for few rows, run by Triton's interpreter, against the model's
own.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.cuda import few_rows
from hf_slospec.cuda import fused_layers as layers
from hf_slospec.cuda.few_row_kernels import MAX_ROWS, MIN_TILE_ROWS, gated_product, joint_products
from hf_slospec.cuda.fused_kernels import GELU_TANH, SILU
from tests.cuda.parity import assert_same_up_to_rounding, fused_layers, half
from tests.support.breadth import nightly_but, quick_or
from tests.support.packed import CHANGED

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu"
)
JOINT = (nn.Linear, "forward")


@pytest.fixture
def _faster(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    monkeypatch.setattr(few_rows, "is_faster", lambda *_: True)


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).norm() <= 0.015 * expected.float().norm()


@pytest.mark.parametrize("num_rows", [1, 5, 17, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(40, (70, 10, 64)), (130, (64, 3)), (128, (129,))], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_by_several_weights(num_rows, inputs, outputs, has_bias):
    rows, weights = (
        torch.randn(num_rows, inputs).bfloat16(),
        [torch.randn(n, inputs).bfloat16() for n in outputs],
    )
    biases = [torch.randn(n).bfloat16() if has_bias else None for n in outputs]
    for out, weight, bias in zip(
        joint_products(rows, weights, biases), weights, biases, strict=True
    ):
        assert_close(
            out, F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        )


@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize(
    ("activation", "function"),
    [(SILU, F.silu), (GELU_TANH, functools.partial(F.gelu, approximate="tanh"))],
)
def test_gated_products(num_rows, activation, function):
    rows, gate, up = (torch.randn(n, 130).bfloat16() for n in (num_rows, 70, 70))
    gate /= 10
    assert_close(
        gated_product(rows, gate, up, activation),
        function(F.linear(rows, gate)) * F.linear(rows, up),
    )


@pytest.mark.usefixtures("_faster")
@pytest.mark.parametrize("family", nightly_but(["llama"], ["llama", "qwen2", "qwen3", "gemma3"]))
def test_models_compute_the_same_up_to_rounding(family):
    model = half(family)
    fused = fused_layers(model)
    assert JOINT in fused.attributes
    for length in (6, MIN_TILE_ROWS + 1, MAX_ROWS + 1):
        assert_same_up_to_rounding(model, fused, length)


@pytest.mark.usefixtures("_faster")
def test_one_kernel_for_three_layers_and_one_for_a_gate(monkeypatch):
    model = half("llama")
    calls = list[str]()
    fused = fused_layers(model)
    plain = nn.functional.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: calls.append("linear") or plain(x, w, b))
    with fused.in_force():
        model(torch.arange(3, 9)[None])
    num_layers = model.config.num_hidden_layers
    assert len(calls) == 2 * num_layers + 1  # o_proj and down_proj of each layer, and the head


@pytest.mark.usefixtures("_faster")
def test_layers_asked_for_other_states_compute_those():
    model = half("llama")
    attention = model.model.layers[0].self_attn
    fused = fused_layers(model)
    states, others = torch.randn(2, 1, 4, 32, dtype=torch.bfloat16)
    with fused.in_force():
        attention.q_proj(states)
        assert attention.k_proj(others).equal(attention.k_proj(others))
        assert_close(attention.k_proj(others), F.linear(others, attention.k_proj.weight))
        assert_close(attention.v_proj(states), F.linear(states, attention.v_proj.weight))
        transposed = torch.randn(1, 32, 4, dtype=torch.bfloat16).transpose(1, 2)
        assert_close(attention.q_proj(transposed), F.linear(transposed, attention.q_proj.weight))


@pytest.mark.usefixtures("_faster")
def test_hooks_of_joint_and_gated_layers_run():
    model = half("llama")
    seen = list[str]()
    fused = fused_layers(model)
    layer = model.model.layers[0]
    for module, name in ((layer.self_attn.k_proj, "k"), (layer.mlp.up_proj, "up")):
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    with fused.in_force():
        model(torch.arange(3, 9)[None])
    assert seen == ["k", "up"]


def _bias_gone(model):
    model.model.layers[0].self_attn.k_proj.bias = None
    model.model.layers[1].self_attn.q_proj.bias = None


def _bias_with_gaps(model):
    projection = model.model.layers[0].self_attn.v_proj
    projection.bias = nn.Parameter(torch.randn(2 * len(projection.bias), dtype=torch.bfloat16)[::2])


def _own_forward(model):
    model.model.layers[0].mlp.up_proj.forward = torch.zeros_like
    model.model.layers[0].mlp.gate_proj.forward = torch.zeros_like
    model.model.layers[0].mlp.down_proj.forward = torch.zeros_like


def _other_layers(model):
    for parameter in model.model.layers[1].parameters():
        parameter.data.mul_(1.5)
    mlp = model.model.layers[0].mlp
    attention = model.model.layers[0].self_attn
    mlp.up_proj = nn.Linear(*mlp.up_proj.weight.shape[::-1], dtype=torch.bfloat16)
    attention.k_proj = nn.Linear(*attention.k_proj.weight.shape[::-1], dtype=torch.bfloat16)


@pytest.mark.usefixtures("_faster")
@pytest.mark.parametrize("change", [_bias_gone, _bias_with_gaps, _own_forward, _other_layers])
def test_changes_count_at_once(change):
    model = half("qwen2")
    fused = fused_layers(model)
    change(model)
    for _ in range(quick_or(2, 3)):
        assert_same_up_to_rounding(model, fused)


@pytest.mark.usefixtures("_faster")
def test_global_hooks_see_gated_layers():
    model = half("llama")
    seen = set[int]()
    fused = fused_layers(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(id(module)))
    try:
        with fused.in_force():
            model(torch.arange(3, 9)[None])
    finally:
        handle.remove()
    assert {id(layer) for layer in model.modules() if isinstance(layer, nn.Linear)} <= seen


@pytest.mark.usefixtures("_faster")
def test_calls_of_other_forms():
    model = half("llama")
    attention, mlp, fused = (
        model.model.layers[0].self_attn,
        model.model.layers[0].mlp,
        fused_layers(model),
    )
    states = torch.randn(4, 32, dtype=torch.bfloat16)
    with fused.in_force():
        assert_close(attention.q_proj(input=states), F.linear(states, attention.q_proj.weight))
        assert mlp(states[None, :0]).shape == (1, 0, 32)
        assert attention.q_proj(states[:0]).shape == (0, 32)
        assert_close(attention.q_proj(states[0]), F.linear(states[0], attention.q_proj.weight))
        with pytest.raises(RuntimeError):
            attention.q_proj(states[:, :30])
        attention.q_proj(states)
        states.mul_(3)
        assert_close(attention.k_proj(states), F.linear(states, attention.k_proj.weight))


@pytest.mark.usefixtures("_faster")
def test_projections_that_are_not_all_called_become_separate(monkeypatch):
    model = half("llama")
    calls = list[int]()
    attention = model.model.layers[0].self_attn
    fused = fused_layers(model)
    plain = few_rows._joint
    monkeypatch.setattr(few_rows, "_joint", lambda *given: calls.append(1) or plain(*given))
    states = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    with fused.in_force():
        for _ in range(3):
            assert_close(attention.q_proj(states), F.linear(states, attention.q_proj.weight))
    assert len(calls) == 1


@pytest.mark.usefixtures("_faster")
def test_replaced_layers_are_freed():
    model = half("llama")
    fused = fused_layers(model)
    old = weakref.ref(model.model.layers[0].self_attn.q_proj)
    model.model.layers[0].self_attn.q_proj = nn.Identity()
    fused.renew(CHANGED)
    gc.collect()
    assert old() is None and JOINT in fused.attributes


@pytest.mark.usefixtures("_faster")
def test_compilers_of_other_threads_see_torchs_own_layers():
    fused = fused_layers(half("llama"))
    layer = nn.Linear(4, 3)
    states = torch.randn(2, 4)
    with fused.in_force():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states), F.linear(states, layer.weight, layer.bias))


def test_without_a_gain_layers_stay_separate(monkeypatch):
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    for answer in (lambda *_: False, lambda *_: 1 // 0):  # slower, or it fails
        monkeypatch.setattr(few_rows, "is_faster", answer)
        assert JOINT not in fused_layers(half("llama")).attributes


@pytest.mark.usefixtures("_faster")
def test_projections_of_other_classes_stay_separate():
    model = half("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj)
    assert JOINT not in fused_layers(model).attributes


@pytest.mark.usefixtures("_faster")
def test_a_gated_layer_whose_output_is_zero_is_fused():
    """As those are that an inflated model has added."""
    model = half("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    assert any(owner.__name__ == "LlamaMLP" for owner, _ in fused_layers(model).attributes)
