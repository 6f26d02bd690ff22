"""Models with quantised weights: tokens are those of stock generate with the dequantised weights."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import hf_slospec
from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from hf_slospec.cpu import formats
from hf_slospec.cpu.quantised_models import pack_weights
from hf_slospec.cpu.quantised_weight import QuantisedWeight
from hf_slospec.errors import InvalidFileError
from tests.support.stock_matrix import model_of
from tests.support.toys.gguf_files import write_gguf
from tests.support.toys.tiny_models import FAMILIES, assert_same_as_stock, ragged_prompts, tiny_copy

EAGER = dict(compile=False)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def packed_weights(model):
    return [weight for weight in model.parameters() if isinstance(weight, QuantisedWeight)]


def packable(model):
    """Return the layers whose weights have groups of 32 inputs."""
    layers = [each for each in model.modules() if isinstance(each, (nn.Linear, nn.Embedding))]
    return [layer for layer in layers if layer.weight.shape[1] % 32 == 0]


def dequantised(model):
    """Return a copy of a model with dense weights of the same values."""
    dense = copy.deepcopy(model)
    for layer in dense.modules():
        for name, weight in list(layer._parameters.items()):
            if isinstance(weight, QuantisedWeight):
                values = weight.matrix.dequantised().to(weight.dtype)
                layer._parameters[name] = nn.Parameter(values, requires_grad=False)
    dense.tie_weights()
    return dense


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, top_k=20)])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_on_request(weights, options):
    model = tiny_copy("llama")
    ours = SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(weights=weights, **EAGER))
    assert len(packed_weights(model)) == 2 * 6 + 1
    assert type(model.model.embed_tokens.weight) is nn.Parameter
    dense = dequantised(model)
    assert_same_as_stock(dense, ours.generate, ragged_prompts(3), max_new_tokens=20, **options)
    assert torch.equal(
        dense.generate(**ragged_prompts(1), do_sample=False, max_new_tokens=9),
        model.generate(**ragged_prompts(1), do_sample=False, max_new_tokens=9),
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "Qwen3MoeForCausalLM"])
def test_experts_stay_dense_and_are_named(name, caplog):
    model = copy.deepcopy(model_of(name))
    settings = dict(weights="int4" if name == "mixtral" else "int8", **EAGER)
    for _ in range(2):
        ours = SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(**settings))
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "2 modules of experts" in record.getMessage()
    assert "model.layers.0.mlp.experts, stay dense" in record.getMessage()
    assert len(packed_weights(model)) == 2 * 4 + 1
    dense = dequantised(model)
    for options in (dict(do_sample=False), dict(do_sample=True, top_k=20)):
        assert_same_as_stock(dense, ours.generate, ragged_prompts(2), max_new_tokens=12, **options)


def test_draft_models_and_tied_embeddings_are_quantised():
    model = copy.deepcopy(model_of("llama-tied"))
    draft = copy.deepcopy(model_of("llama-tied", 0.03))
    config = SLOSpecConfig(weights="int8", **EAGER)
    ours = SLOSpecGenerator(model, draft, config=config)
    for each in (model, draft):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert isinstance(each.lm_head.weight, QuantisedWeight)
    assert_same_as_stock(
        dequantised(model), ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=20
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "Lfm2ForCausalLM"])
def test_weights_of_gguf_files(tmp_path, caplog, name, kind):
    write_gguf(model_of(name), tmp_path / "tiny.gguf", kind)
    load = AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, gguf_file="tiny.gguf")
    stock = load(tmp_path, gguf_file="tiny.gguf")
    for each in (model, stock):  # a weight whose values were changed after loading stays dense
        with torch.no_grad():
            packable(each)[1].weight[3, 5] += 0.25
    with caplog.at_level(logging.INFO, "hf_slospec.cpu.quantised_models"):
        settings = EAGER | (
            dict(weights=str(tmp_path / "tiny.gguf")) if name.startswith("Lfm2") else {}
        )
        ours = SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(**settings))
    number = len({layer.weight for layer in packable(stock)}) - 1
    assert len(packed_weights(model)) == number > 5
    assert f"{number} in {4 if kind == 'Q4_0' else 8} bits" in caplog.text
    assert_same_as_stock(
        stock, ours.generate, ragged_prompts(3), do_sample=False, max_new_tokens=20
    )


def test_kept_weights_stay(tmp_path):
    write_gguf(model_of("llama"), tmp_path / "tiny.gguf", "Q8_0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(weights="keep", **EAGER))
    pack_weights(model, SLOSpecConfig(exact="self"))
    assert not packed_weights(model)


def test_what_cannot_be_quantised_is_refused():
    model = tiny_copy("llama")
    with pytest.raises(
        UnsupportedOptionError, match=r"weights='int8' is not possible: .*exact='self'"
    ):
        hf_slospec.enable(model, "lookup", config=SLOSpecConfig(weights="int8", exact="self"))
    assert not packed_weights(model)
    hf_slospec.enable(model, "lookup", config=SLOSpecConfig(weights="int8", **EAGER))
    hf_slospec.disable(model)
    hf_slospec.enable(model, "lookup", config=SLOSpecConfig(weights="int8", **EAGER))
    hf_slospec.disable(model)
    with pytest.raises(UnsupportedOptionError, match=r"is quantised already, .* to 4 bits"):
        hf_slospec.enable(model, "lookup", config=SLOSpecConfig(weights="int4", **EAGER))


def test_files_that_are_not_the_models(tmp_path):
    write_gguf(model_of("llama"), tmp_path / "tiny.gguf", "Q8_0")
    model = tiny_copy("llama")
    for name, match in (
        ("tiny", "none of the model's weights are those of the file"),
        ("no", "no such file"),
    ):
        config = SLOSpecConfig(weights=str(tmp_path / f"{name}.gguf"), **EAGER)
        with pytest.raises(InvalidFileError, match=match):
            hf_slospec.enable(model, "lookup", config=config)
    with pytest.raises(InvalidInputError, match="weights"):
        SLOSpecConfig(weights="int3")


@pytest.mark.nightly
def test_compiled_forwards_with_an_embedding_that_scales_its_rows():
    model = tiny_copy("gemma3")
    model.lm_head.weight = model.model.embed_tokens.weight
    config = SLOSpecConfig(weights="int8", compile="wait")
    ours = SLOSpecGenerator(model, drafter="lookup", config=config)
    assert ours.stats().forwards == {"target": "compiled"}
    assert_same_as_stock(
        dequantised(model), ours.generate, ragged_prompts(3), do_sample=False, max_new_tokens=20
    )
    assert ours.stats().forwards == {"target": "compiled"}


def quantised_by_torchao(group=None):
    """Return a model in int8 by torchao, with a scale for each row or for each ``group`` of inputs.

    There are no kernels for groups of fewer than 32."""
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    rows = granularity.PerAxis(0) if group is None else granularity.PerGroup(group)
    model = tiny_copy("llama")
    config = quantization.IntxWeightOnlyConfig(torch.int8, granularity=rows)
    quantization.quantize_(model, config)
    return model


def test_formats_that_are_not_compiled_are_named_once(caplog):
    """A warning, status() and stats() name the format, the path that serves it, and why."""
    model = quantised_by_torchao(group=16)
    found = r"formats of weights that are not compiled: \d+ of torchao's IntxUnpackedToInt8Tensor"
    for _ in range(2):
        ours = SLOSpecGenerator(model, drafter="lookup")
        assert re.fullmatch(f"eager: {found}", ours.stats().forwards["target"])
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.name.startswith("hf_slospec.")
    assert re.search(f"LlamaForCausalLM has {found}.*weights='int8' or 'int4'", record.getMessage())
    shown = hf_slospec.status(ours)
    assert all("IntxUnpacked" in text for text in (shown.weights, shown.forwards["target"]))
    assert_same_as_stock(model, ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=8)


@pytest.mark.parametrize("settings", [dict(compile=False), dict(weights="keep")])
def test_no_warning_of_formats_where_compiling_was_not_asked_for(caplog, settings):
    model = quantised_by_torchao(group=16)
    SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(**settings))
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


def test_weights_of_torchao_are_read_once(monkeypatch):
    model = quantised_by_torchao()
    read = []
    plain = formats._read_torchao
    monkeypatch.setattr(
        formats,
        "_read_torchao",
        lambda weight, *sizes: read.append(weight) or plain(weight, *sizes),
    )
    SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(**EAGER))
    assert len(read) == len(packed_weights(model)) == len(set(map(id, read))) > 0


def test_writes_to_packed_weights_are_refused():
    """Such a write would be lost: operators get a dequantised copy."""
    model = tiny_copy("llama")
    pack_weights(model, SLOSpecConfig(weights="int8", **EAGER))
    weight = model.lm_head.weight
    writes = {
        "mul_": lambda: weight.mul_(2),
        "zero_": lambda: nn.init.zeros_(weight),
        "copy_": lambda: weight.data.copy_(torch.zeros(weight.shape)),
        "add_": lambda: weight.data.add_(1),
        "__set__": lambda: setattr(weight, "data", torch.zeros(weight.shape)),
        "__setitem__": lambda: weight.__setitem__(0, 0),
    }
    for name, write in writes.items():
        with torch.no_grad(), pytest.raises(UnsupportedOptionError, match=f"{name} cannot write"):
            write()
    with pytest.raises(RuntimeError, match="set a dense one in its place"):
        model.load_state_dict(tiny_copy("llama").state_dict())


def test_other_operators_return_plain_tensors():
    layer = nn.Linear(64, 40)
    pack_weights(layer, SLOSpecConfig(weights="int8", **EAGER))
    weight = layer.weight
    dense = weight.matrix.dequantised()
    assert torch.equal(weight * 2 + 1, dense * 2 + 1)
    assert torch.equal(weight.T[3:].contiguous(), dense.T[3:])
    assert weight.data.norm() == dense.norm()
    x = torch.randn(3, 64, dtype=torch.float64)
    bias = layer.bias.double()
    torch.testing.assert_close(layer.double()(x), nn.functional.linear(x, dense.double(), bias))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_what_is_saved_has_the_same_values_as_dense_weights(tmp_path, name):
    model = copy.deepcopy(model_of(name))
    ours = SLOSpecGenerator(model, drafter="lookup", config=SLOSpecConfig(weights="int4", **EAGER))
    assert packed_weights(model)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    is_tied = state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert is_tied == (name == "llama-tied")
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for weight, expected in zip(saved.parameters(), dequantised(model).parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert_same_as_stock(
        saved, ours.generate, ragged_prompts(2), do_sample=False, max_new_tokens=20
    )
    assert len(packed_weights(model)) == len(packed_weights(copy.deepcopy(model)))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("factor", [1e-7, 1e7])
def test_scales_that_fp16_does_not_hold(weights, factor):
    layer = nn.Linear(64, 40)
    before = layer.weight.detach().mul_(factor).clone()
    pack_weights(layer, SLOSpecConfig(weights=weights, **EAGER))
    error = (layer.weight.matrix.dequantised() - before).norm() / before.norm()
    assert error < {"int8": 0.01, "int4": 0.12}[weights]


def test_nothing_to_quantise_is_reported(caplog):
    for layer in (nn.Linear(40, 64), nn.Linear(64, 64).double()):
        caplog.clear()
        pack_weights(layer, SLOSpecConfig(weights="int8", **EAGER))
        assert "quantises no layer of Linear" in caplog.text
        assert type(layer.weight) is nn.Parameter


def test_files_that_are_not_those_of_the_model(tmp_path):
    (tmp_path / "text.gguf").write_bytes(b"text" * 100)
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in ("text", "empty"):
        with pytest.raises(InvalidFileError, match=f"{name}.gguf' cannot be read"):
            pack_weights(tiny_copy("llama"), SLOSpecConfig(weights=f"{tmp_path}/{name}.gguf"))
    write_gguf(model_of("llama"), tmp_path / "other.gguf", "Q8_0")
    narrow = {"hidden_size": 32, "intermediate_size": 64}
    name, settings = FAMILIES["llama"]
    model = getattr(transformers, name)(**settings | narrow)
    with pytest.raises(InvalidFileError, match="none of the model's weights"):
        pack_weights(
            AutoModelForCausalLM.from_config(model),
            SLOSpecConfig(weights=str(tmp_path / "other.gguf"), **EAGER),
        )
