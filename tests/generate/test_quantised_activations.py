"""Layers that quantise activations are refused by name: logits of a token depend on the other
tokens of a forward.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hf_slospec
from hf_slospec import FallbackWarning, SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy

CONFIG = SLOSpecConfig(compile=False)
REFUSED = "quantises activations"


def by_torchao(model, name):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, getattr(quantization, name)())
    return model


def by_torch(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Linear8bitLt(nn.Linear):
    """Stands for the class of bitsandbytes, which needs a GPU; outlier columns are those of all
    tokens.
    """

    __module__ = "bitsandbytes.nn.modules"


def like_bitsandbytes(model):
    model.model.layers[1].mlp.up_proj.__class__ = Linear8bitLt
    return model


def like_transformers(model):
    """Set what transformers' layers in 8-bit floats have."""
    model.model.layers[1].mlp.up_proj.activation_scheme = "dynamic"
    return model


def like_compressed_tensors(model):
    model.model.layers[1].mlp.up_proj.quantization_scheme = SimpleNamespace(
        input_activations=SimpleNamespace(bits=8)
    )
    return model


QUANTISED = {
    "torchao int8": lambda model: by_torchao(model, "Int8DynamicActivationInt8WeightConfig"),
    "torch dynamic": by_torch,
    "bitsandbytes": like_bitsandbytes,
    "transformers fp8": like_transformers,
    "compressed-tensors": like_compressed_tensors,
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_activations_are_refused_or_fall_back(name):
    model = QUANTISED[name](tiny_copy("llama"))
    call = dict(ragged_prompts(2), max_new_tokens=4)
    expected = model.generate(**call)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        SLOSpecGenerator(model, config=CONFIG)
    hf_slospec.enable(model, config=CONFIG, fallback=True)
    with pytest.warns(FallbackWarning, match=REFUSED):
        assert torch.equal(model.generate(**call, slo_tpot=0.1), expected)


def test_models_that_are_quantised_after_enable_are_refused():
    model = tiny_copy("llama")
    call = dict(ragged_prompts(2), max_new_tokens=4)
    hf_slospec.enable(model, config=CONFIG)
    by_torchao(model, "Int8DynamicActivationInt8WeightConfig")
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        model.generate(**call, slo_tpot=0.1)
