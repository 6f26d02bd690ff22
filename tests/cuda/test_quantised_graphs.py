"""Captured forwards of models with quantised weights: tapes of operators stand in for CUDA graphs.

What graphs contain are the addresses of all tensors that hold a weight, so graphs are dropped when
any of them is replaced.
"""

from __future__ import annotations

import copy
from operator import attrgetter

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model import version
from tests.cuda.test_captured_models import CONFIG, GREEDY, BrokenTapes
from tests.support.graph_bench import Bench
from tests.support.toys.nf4 import quantise_to_nf4
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model


def with_torchao(name):
    def quantise(model):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model.model.layers, getattr(quantization, name)())

    return quantise


KEPT = CONFIG.model_copy(update={"weights": "keep"})  # on a CPU, they would be packed

FORMATS = {
    "int8": (with_torchao("Int8WeightOnlyConfig"), ("qdata", "scale")),
    "fp8": (with_torchao("Float8WeightOnlyConfig"), ("qdata", "scale")),
    "nf4": (
        quantise_to_nf4,
        (
            *("data", "quant_state.absmax", "quant_state.code", "quant_state.offset"),
            *("quant_state.state2.absmax", "quant_state.state2.code"),
        ),
    ),
}
COMPONENTS = [(name, part) for name, (_, parts) in FORMATS.items() for part in parts]


def quantised(name):
    model = copy.deepcopy(tiny_model("llama"))
    FORMATS[name][0](model)
    return model


def replace_component(weight, path):
    """Replace a tensor of a weight by one with other values, at another address."""
    owner, _, name = path.rpartition(".")
    holder = attrgetter(owner)(weight) if owner else weight
    changed = getattr(holder, name).detach().clone()
    values = (
        changed.view(torch.uint8) if changed.element_size() == 1 else changed
    )  # as fp8 has no flip
    values.view(-1).copy_(values.view(-1).flip(0) if values.numel() > 1 else 2 * values)
    setattr(holder, name, changed)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_models_are_captured(tapes, name):
    model = quantised(name)
    generator = SLOSpecGenerator(model, config=KEPT)
    assert generator.stats().forwards["target"] == "eager: no forward has recurred yet"
    for _ in range(2):
        assert_same_as_stock(
            model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20
        )
    assert tapes.num_replayed > tapes.num_captured > 0
    assert generator.stats().forwards["target"] == "cuda_graphs"


@pytest.mark.parametrize("is_read", [False, True], ids=["in the next step", "in the next call"])
@pytest.mark.parametrize(("name", "path"), COMPONENTS)
def test_graphs_are_dropped_when_a_component_is_replaced(tapes, name, path, is_read):
    bench = Bench(quantised(name))
    for _ in range(3):
        before = bench.verify()
    storage = bench.packed.version.storage
    replace_component(bench.packed.model.model.layers[0].mlp.up_proj.weight, path)
    if is_read:
        bench.packed.renew()
    changed = [bench.verify() for _ in range(3)]
    assert bench.packed.version.storage > storage
    bench.graphs.patience = 10**9
    bench.graphs._captured.clear()
    for logits in changed:
        torch.testing.assert_close(logits, bench.verify())
    assert not torch.allclose(changed[0], before)


def test_weights_may_become_quantised(tapes):
    model = copy.deepcopy(tiny_model("llama"))
    bench = Bench(model)
    for _ in range(3):
        bench.verify()
    other = quantised("int8")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = other.model.layers[0].mlp.up_proj.weight
    bench.verify()
    storage = bench.packed.version.storage
    bench.verify()
    assert bench.packed.version.storage == storage
    replace_component(layer.weight, "scale")
    bench.verify()
    assert bench.packed.version.storage > storage


@pytest.mark.parametrize("name", FORMATS)
def test_captures_that_fail_are_reported(tapes, name, monkeypatch):
    monkeypatch.setattr("hf_slospec.cuda.captured.capturer_for", lambda device: BrokenTapes())
    model = quantised(name)
    generator = SLOSpecGenerator(model, config=KEPT)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    how = generator.stats().forwards["target"]
    assert how.startswith("eager: a forward cannot be captured") and "not permitted" in how


def test_sparse_and_offloaded_weights_are_not_captured():
    for made in (
        torch.nn.Linear(4, 4),
        quantised("nf4"),
        quantised("int8"),
    ):
        assert version.can_be_captured(made)
        assert version.can_be_traced(made) == isinstance(made, torch.nn.Linear)
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse())
    assert not version.can_be_captured(layer)
    with torch.device("meta"):
        offloaded = torch.nn.Linear(4, 4)
    offloaded.bias = torch.nn.Parameter(torch.zeros(4))
    assert not version.can_be_captured(offloaded)
    split = quantised("nf4")
    state = split.model.layers[1].mlp.up_proj.weight.quant_state.state2
    state.absmax = state.absmax.to("meta")
    assert not version.can_be_captured(split)


def test_status_without_graphs_says_why(tapes):
    generator = SLOSpecGenerator(
        tiny_model("llama"),
        config=SLOSpecConfig(attention="flash", cuda_graphs=False, compile=False),
    )
    assert generator.stats().forwards["target"].startswith("eager: ")
