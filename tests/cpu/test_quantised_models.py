"""Models with quantised weights: tokens are those of stock generate with the dequantised weights."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_slospec
from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from hf_slospec.cpu.quantised_models import pack_weights
from hf_slospec.cpu.quantised_weight import QuantisedWeight
from hf_slospec.errors import InvalidFileError
from tests.support.stock_matrix import model_of
from tests.support.toys.gguf_files import write_gguf
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_copy

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
