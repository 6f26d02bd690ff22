"""Graphs of deep models in pieces: one of each kind is compiled, and rare ones are interpreted."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cpu.compile_job import CompileJob
from hf_slospec.cpu.pieces import Graph
from hf_slospec.cpu.twin import GraphDescription, export_graph
from hf_slospec.model.tree_mask import chain
from tests.cpu.test_compiled import generated, generator
from tests.cpu.test_quantised_models import dequantised
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import FAMILIES, assert_same_as_stock, ragged_prompts

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="forwards are compiled with g++"
)
NUM_LAYERS = 16  # of 17 pieces, the first and the last one are interpreted


class Finished:
    """A compilation that ran in this process."""

    def wait(self):
        pass


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr(CompileJob, "start", lambda self: self.run() or Finished())


def deep_model(family, **changes):
    name, settings = FAMILIES[family.removesuffix("-tied")]
    layers = "n_layer" if "n_layer" in settings else "num_hidden_layers"
    settings = settings | {layers: NUM_LAYERS} | changes
    if family.endswith("-tied"):
        settings = settings | dict(tie_word_embeddings=True)
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * (NUM_LAYERS // 2)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()


def graph_of(model, **options):
    layers = packed_model(model).layers
    program, *_ = export_graph(GraphDescription.of(model, layers, (), True))
    return Graph(program, **options)


def test_layers_of_two_kinds_of_attention_share_a_piece():
    """Windows are arguments of attention, and rotary embeddings inputs of a piece."""
    model = deep_model("gemma3")
    (package,) = packed_model(model, compile="wait").path("compiled")._packages.values()
    assert len(package._job.interface.pieces) == 1
    ours = generator(model)
    assert generated(ours.generate) == generated(model.generate)
    assert ours.stats().forwards == {"target": "compiled"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", dict(weights="int4")),
        ("llama-tied", dict(weights="int8")),
        ("mixtral", dict(weights="int4")),
        ("gpt-oss", {}),
        ("gpt2", {}),
        ("llama", dict(exact="self")),
    ],
)
def test_deep_models_generate_the_tokens_of_stock(family, options):
    model = deep_model(family)
    config = SLOSpecConfig(compile="wait", **options)
    ours = SLOSpecGenerator(model, drafter="lookup", config=config)
    stock = dequantised(model)
    for sampling in (dict(do_sample=False), dict(do_sample=True, top_k=20)):
        prompts = ragged_prompts(3)
        assert_same_as_stock(stock, ours.generate, prompts, max_new_tokens=20, **sampling)
    assert ours.stats().forwards == {"target": "compiled"}


def test_graphs_of_few_layers_are_one_piece():
    graph = graph_of(deep_model("llama", num_hidden_layers=2))
    assert len(graph.kinds) == len(graph.compiled) == 1
    assert graph.script.count("run_piece(") == 1 and "attend" not in graph.script


def test_graphs_with_operators_that_the_interpreter_lacks_are_one_piece(monkeypatch):
    """All operators are in the piece, as are sizes that no tensor between two pieces has."""
    compiled = torch.jit.CompilationUnit
    refused = []

    def compile(text):
        if "silu" in text:
            refused.append(text)
            raise RuntimeError("unknown builtin op")
        return compiled(text)

    monkeypatch.setattr(torch.jit, "CompilationUnit", compile)
    graph = graph_of(deep_model("llama"))
    assert [text.count("run_piece(") for text in refused] == [NUM_LAYERS - 1]
    assert len(graph.kinds) == len(graph.compiled) == 1


@pytest.mark.nightly
def test_models_of_the_same_layers_share_a_piece():
    kinds = [graph_of(deep_model("llama", vocab_size=size)).kinds for size in (101, 107)]
    assert kinds[0].keys() == kinds[1].keys() and len(kinds[0]) == 1


@pytest.mark.nightly
def test_hidden_states_between_pieces():
    model = deep_model("llama")
    outputs = []
    layers = (0, 3, NUM_LAYERS)
    for each in (packed_model(model, compile="wait"), packed_model(model)):
        cache = each.kv_cache
        with cache.temporary([9]) as (sequence,):
            parts = [chain(each, sequence, list(range(3, 12)))]
            outputs.append(each.outputs(cache.pool, parts, torch.tensor([8]), layers))
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    torch.testing.assert_close(outputs[0].features, outputs[1].features)


@pytest.mark.nightly
def test_models_with_reproducible_bits_are_compiled_in_all_pieces():
    graph = graph_of(deep_model("llama"), max_interpreted=0.0)
    assert len(graph.kinds) == 3 and len(graph.compiled) == NUM_LAYERS + 1
