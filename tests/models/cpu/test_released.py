"""prepack="only": packed weights in place of the plain ones, and the plain ones given back unchanged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from hf_slospec.models.cpu.packed_layers import restore_weights
from hf_slospec.models.cpu.prepacked import PrepackedLayers
from tests.support.kernels import WORKING, force_kernel
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not WORKING, reason="no kernels for packed weights on this machine")
IDS = torch.arange(3, 15)[None]
ONLY = SLOSpecConfig(max_depth=2, prepack="only")


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, WORKING[0][0])


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_model("llama"))


@pytest.mark.parametrize(("kernel", "dtype"), WORKING)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_all_forwards_use_the_packed_weights_and_disable_gives_the_plain_ones_back(
    monkeypatch: pytest.MonkeyPatch, family: str, kernel: str, dtype: torch.dtype
) -> None:
    force_kernel(monkeypatch, kernel)
    model: Any = copy.deepcopy(tiny_model(family)).to(dtype)
    before, plain = copy.deepcopy(model.state_dict()), model.generate(IDS, max_new_tokens=8)
    gen = SLOSpecGenerator(model, model, config=ONLY)
    memory = gen.decoder.speculator.memory(0)
    tied = before["lm_head.weight"].nbytes if family == "gpt2" else 0  # the embedding needs it
    assert memory.prepacked == memory.released + tied > 0
    ours, stock = gen.generate(IDS, max_new_tokens=8), model.generate(IDS, max_new_tokens=8)
    assert ours.shape == stock.shape == plain.shape
    if dtype == torch.float32:
        assert torch.equal(ours, plain) and torch.equal(stock, plain)
    hf_slospec.disable(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model.generate(IDS, max_new_tokens=8), plain)


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "act",
    [
        save,
        lambda model, folder: copy.deepcopy(model),
        lambda model, folder: pickle.dumps(model),
        lambda model, folder: model.to(torch.bfloat16),
        lambda model, folder: model.load_state_dict(tiny_model("llama").state_dict()),
        lambda model, folder: model(inputs_embeds=torch.randn(1, 3, model.config.hidden_size, requires_grad=True)),
    ],
)
def test_what_needs_the_plain_weights_is_refused_by_name(
    model: Any, act: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    SLOSpecGenerator(model, model, config=ONLY)
    with pytest.raises(UnsupportedModelError, match=r"prepack='only'.*hf_slospec\.disable"):
        act(model, tmp_path)
    hf_slospec.disable(model)
    act(model, tmp_path)


def test_what_changes_nothing_is_allowed(model: Any) -> None:
    SLOSpecGenerator(model, model, config=ONLY)
    assert model.to("cpu").float() is model


def test_a_new_weight_is_packed_and_released_too() -> None:
    module, input = nn.Sequential(nn.Linear(24, 40)), torch.randn(3, 24)
    layers = PrepackedLayers(module, "only")
    weight = torch.randn(40, 24)
    module[0].weight = nn.Parameter(weight)
    plain = torch.nn.functional.linear(input, weight, module[0].bias)
    with torch.no_grad():
        torch.testing.assert_close(module(input), plain)
    layers.renew()
    assert layers.num_released_bytes == weight.nbytes
    restore_weights(module)
    assert torch.equal(module[0].weight, weight)


def test_a_second_generator_uses_the_same_packed_weights(model: Any) -> None:
    plain = model.generate(IDS, max_new_tokens=8)
    SLOSpecGenerator(model, model, config=ONLY)
    other = SLOSpecGenerator(model, model, config=SLOSpecConfig(max_depth=2))
    assert torch.equal(other.generate(IDS, max_new_tokens=8), plain)
    assert other.decoder.speculator.memory(0).released > 0
    hf_slospec.disable(model)
    assert torch.equal(other.generate(IDS, max_new_tokens=8), plain)
    assert other.decoder.speculator.memory(0).released == 0


def test_no_tokens_give_no_outputs() -> None:
    module = nn.Sequential(nn.Linear(24, 40))
    PrepackedLayers(module, "only")
    with torch.no_grad():
        assert module(torch.randn(1, 0, 24)).shape == (1, 0, 40)
