"""Layers of few rows by one kernel, run by Triton's interpreter, against the model's own layers."""

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
from hf_slospec.cuda.few_row_kernels import (
    BLOCK_M,
    MAX_ROWS,
    MIN_TILE_ROWS,
    gated_product,
    invariant_product,
    joint_products,
)
from hf_slospec.cuda.fused_kernels import GELU_TANH, SILU
from tests.cuda.parity import assert_same_up_to_rounding, fused_layers, half
from tests.support.breadth import nightly_but, quick_or
from tests.support.packed import CHANGED

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu"
)
JOINT = (nn.Linear, "forward")


@pytest.fixture(autouse=True)
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
    rows, *weights = (torch.randn(n, inputs).bfloat16() for n in (num_rows, *outputs))
    biases = [torch.randn(n).bfloat16() if has_bias else None for n in outputs]
    outs = joint_products(rows, weights, biases)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        assert_close(out, F.linear(rows, weight, bias))


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


TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # share of the largest value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (96, 200)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_invariant_products(shape, dtype, is_transposed):
    outputs, inputs = shape
    rows, weight = (torch.randn(n, inputs).to(dtype) for n in (BLOCK_M + 9, outputs))
    bias = torch.randn(outputs).to(dtype)
    weight = weight.T.contiguous().T if is_transposed else weight
    for added in (None, bias):
        together = invariant_product(rows, weight, added)
        expected = F.linear(rows.float(), weight.float(), None if added is None else added.float())
        assert together.dtype == dtype and not together.isnan().any()
        assert (together.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
        for begin, end in ((0, 1), (3, 20), (BLOCK_M - 1, BLOCK_M + 2), (BLOCK_M + 8, BLOCK_M + 9)):
            assert torch.equal(
                invariant_product(rows[begin:end], weight, added), together[begin:end]
            )


@pytest.mark.parametrize("family", nightly_but(["llama"], ["llama", "qwen2", "qwen3", "gemma3"]))
def test_models_compute_the_same_up_to_rounding(family):
    model = half(family)
    del model.model.layers[1:]  # the interpreter is slow
    fused = fused_layers(model)
    assert JOINT in fused.attributes
    for length in (6, MIN_TILE_ROWS + 1, MAX_ROWS + 1):
        assert_same_up_to_rounding(model, fused, length)


def inputs():
    return torch.arange(3, 9)[None]


def test_projections_and_gates_call_no_linear_function(monkeypatch):
    model = half("llama")
    calls = list[str]()
    fused = fused_layers(model)
    plain = nn.functional.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: calls.append("linear") or plain(x, w, b))
    with fused.in_force():
        model(inputs())
    num_layers = model.config.num_hidden_layers
    assert len(calls) == 2 * num_layers + 1  # o_proj and down_proj of each layer, and the head


def test_calls_that_the_kernel_does_not_take_are_plain(monkeypatch):
    model = half("llama")
    attention = model.model.layers[0].self_attn
    fused = fused_layers(model)
    states, others = torch.randn(2, 4, 32, dtype=torch.bfloat16)

    def check(name, *given, **named):
        layer = getattr(attention, name)
        (states,) = *given, *named.values()
        assert_close(layer(*given, **named), F.linear(states, layer.weight))

    with fused.in_force():
        attention.q_proj(states)
        check("k_proj", others)
        check("k_proj", others)
        check("v_proj", states)
        check("q_proj", torch.randn(1, 32, 4, dtype=torch.bfloat16).transpose(1, 2))
        check("q_proj", input=states)
        check("q_proj", states[0])
        check("q_proj", states[:0])
        assert model.model.layers[0].mlp(states[None, :0]).shape == (1, 0, 32)
        with pytest.raises(RuntimeError):
            attention.q_proj(states[:, :30])
        attention.q_proj(states)
        states.mul_(3)
        check("k_proj", states)
    calls = list[int]()
    plain = few_rows._joint
    monkeypatch.setattr(few_rows, "_joint", lambda *given: calls.append(1) or plain(*given))
    attention = model.model.layers[1].self_attn
    with fused.in_force():
        for _ in range(3):  # the other projections are not called with these states
            check("q_proj", others)
    assert len(calls) == 1


def test_hooks_of_joint_and_gated_layers_run():
    model = half("llama")
    own = list[nn.Module]()
    seen = set[nn.Module]()
    fused = fused_layers(model)
    layer = model.model.layers[0]
    hooked = [layer.self_attn.k_proj, layer.mlp.up_proj]
    for module in hooked:
        module.register_forward_hook(lambda module, *_: own.append(module))
    with fused.in_force():
        model(inputs())
        assert own == hooked
        with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module)):
            model(inputs())
    assert {layer for layer in model.modules() if isinstance(layer, nn.Linear)} <= seen


def remove_biases(model):
    model.model.layers[0].self_attn.k_proj.bias = None
    model.model.layers[1].self_attn.q_proj.bias = None


def set_bias_with_gaps(model):
    projection = model.model.layers[0].self_attn.v_proj
    projection.bias = nn.Parameter(torch.randn(2 * len(projection.bias), dtype=torch.bfloat16)[::2])


def replace_forwards(model):
    mlp = model.model.layers[0].mlp
    for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj):
        layer.forward = torch.zeros_like


def replace_layers(model):
    for parameter in model.model.layers[1].parameters():
        parameter.data.mul_(1.5)
    layer = model.model.layers[0]
    for owner, name in ((layer.mlp, "up_proj"), (layer.self_attn, "k_proj")):
        shape = getattr(owner, name).weight.shape
        setattr(owner, name, nn.Linear(*shape[::-1], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "change", [remove_biases, set_bias_with_gaps, replace_forwards, replace_layers]
)
def test_changes_of_layers_take_effect_at_once(change):
    model = half("qwen2")
    fused = fused_layers(model)
    change(model)
    for _ in range(quick_or(2, 3)):
        assert_same_up_to_rounding(model, fused)


def test_replaced_layers_are_freed():
    model = half("llama")
    fused = fused_layers(model)
    old = weakref.ref(model.model.layers[0].self_attn.q_proj)
    model.model.layers[0].self_attn.q_proj = nn.Identity()
    fused.renew(CHANGED)
    gc.collect()
    assert old() is None and JOINT in fused.attributes


def test_compiled_code_runs_torchs_own_layers():
    fused = fused_layers(half("llama"))
    layer = nn.Linear(4, 3)
    states = torch.randn(2, 4)
    with fused.in_force():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states), F.linear(states, layer.weight, layer.bias))


def test_layers_that_one_kernel_cannot_speed_up_stay_separate(monkeypatch):
    model = half("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj)
    assert JOINT not in fused_layers(model).attributes
    for answer in (lambda *_: False, lambda *_: 1 // 0):  # slower, or it fails
        monkeypatch.setattr(few_rows, "is_faster", answer)
        assert JOINT not in fused_layers(half("llama")).attributes


def test_gated_layers_whose_output_is_zero_are_fused():
    """As those are that an inflated model has added."""
    model = half("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    assert any(owner.__name__ == "LlamaMLP" for owner, _ in fused_layers(model).attributes)
