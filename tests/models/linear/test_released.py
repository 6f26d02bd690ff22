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
from hf_slospec.models.linear.packed_layers import restore_weights
from hf_slospec.models.linear.packed_weight import PackedWeight
from hf_slospec.models.linear.prepacked import PrepackedLayers
from tests.support.forced_kernels import WORKING, force_kernel
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not WORKING, reason="no kernels for packed weights on this machine")
IDS = torch.arange(3, 15)[None]
ONLY = SLOSpecConfig(max_depth=2, prepack="only")


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    force_kernel(monkeypatch, WORKING[0][0])


@pytest.fixture
def model() -> Any:
    # A model of its own: one that has ever given hidden states cannot be pickled, with transformers' hooks in it.
    return tiny_model.__wrapped__("llama")


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


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_restored(model: Any, before: dict[str, torch.Tensor]) -> None:
    hf_slospec.disable(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    integers = {2: torch.int16, 4: torch.int32}
    for name, tensor in before.items():
        kind = integers[tensor.element_size()]
        assert torch.equal(after[name].view(kind), tensor.view(kind)), name  # signs of zeros and nan as well
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize(("kernel", "dtype"), WORKING)
def test_weights_released_in_inference_mode_come_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: torch.dtype, model: Any
) -> None:
    force_kernel(monkeypatch, kernel)
    model = model.to(dtype)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = -0.0
    before = values_of(model)
    hf_slospec.enable(model, config=ONLY)
    with torch.inference_mode():
        model.generate(IDS, slo_tpot=10.0, max_new_tokens=4)
    assert_restored(model, before)
    hf_slospec.enable(model, config=ONLY)
    model.generate(IDS, slo_tpot=10.0, max_new_tokens=4)
    with torch.inference_mode():
        hf_slospec.disable(model)
    assert_restored(model, before)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.clamp_(-1, 1),
        lambda weight: weight.mul_(1.0),
        lambda weight: weight.data.add_(1.0),
        lambda weight: weight.copy_(torch.zeros(1)),
        lambda weight: torch.zeros(1, weight.shape[1]) @ weight.T,
        lambda weight: weight.sum(),
        lambda weight: torch.nn.functional.linear(torch.zeros(1, weight.shape[1]), weight),
        lambda weight: torch.save({"weight": weight}, "/dev/null"),
    ],
)
def test_computing_with_a_released_weight_is_refused_and_harms_nothing(
    model: Any, write: Callable[[torch.Tensor], Any]
) -> None:
    before, plain = values_of(model), model.generate(IDS, max_new_tokens=8)
    gen = SLOSpecGenerator(model, model, config=ONLY)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.device.type == "cpu" and weight.shape == before["model.layers.0.mlp.up_proj.weight"].shape
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"prepack='only'"):
        write(weight)
    assert torch.equal(gen.generate(IDS, max_new_tokens=8), plain)
    assert_restored(model, before)


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.load_state_dict({"model.embed_tokens.weight": torch.zeros(2)}, strict=False),
    ],
)
def test_what_is_refused_has_changed_no_part_of_the_model(model: Any, act: Callable[[Any], Any]) -> None:
    before = values_of(model)
    SLOSpecGenerator(model, model, config=ONLY)
    with pytest.raises(UnsupportedModelError, match=r"prepack='only'"):
        act(model)
    assert_restored(model, before)
    assert not {"_apply", "load_state_dict"} & model.__dict__.keys()
    model.double()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("failing", [1, 2, 5])
def test_an_interrupt_while_weights_are_released_or_restored_loses_none(
    monkeypatch: pytest.MonkeyPatch, family: str, failing: int
) -> None:
    model: Any = copy.deepcopy(tiny_model(family))
    before, plain = values_of(model), model.generate(IDS, max_new_tokens=8)
    unpacked, calls = PackedWeight._unpacked, list[int]()

    def interrupted(self: PackedWeight) -> Any:
        calls.append(1)
        if len(calls) == failing:
            raise KeyboardInterrupt
        return unpacked(self)

    monkeypatch.setattr(PackedWeight, "_unpacked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SLOSpecGenerator(model, model, config=ONLY)
    assert torch.equal(model.generate(IDS, max_new_tokens=8), plain)
    gen = SLOSpecGenerator(model, model, config=ONLY)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        hf_slospec.disable(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=8), plain)
    assert torch.equal(gen.generate(IDS, max_new_tokens=8), plain)
    assert_restored(model, before)


def test_enable_releases_target_and_draft_and_disable_restores_both(model: Any) -> None:
    draft = copy.deepcopy(tiny_model("llama", noise=0.05))
    before = values_of(model), values_of(draft)
    for _ in range(2):
        hf_slospec.enable(model, draft, config=ONLY)
        for each in (model, draft):
            with pytest.raises(UnsupportedModelError, match="saving"):
                each.state_dict()
    hf_slospec.enable(model, draft, config=SLOSpecConfig(max_depth=2))  # settings that release nothing
    assert model.state_dict()
    hf_slospec.enable(model, draft, config=ONLY)
    assert_restored(model, before[0])
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in draft.state_dict().items())


def test_a_parameter_that_something_else_keeps_is_given_back_itself(model: Any) -> None:
    kept = model.model.layers[0].mlp.up_proj.weight
    SLOSpecGenerator(model, model, config=ONLY)
    hf_slospec.disable(model)
    assert model.model.layers[0].mlp.up_proj.weight is kept


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_are_attached_to_released_layers_and_merged_into_none(model: Any) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    reference = peft.get_peft_model(copy.deepcopy(model), lora)
    expected = reference.generate(input_ids=IDS, max_new_tokens=8)
    SLOSpecGenerator(model, model, config=ONLY)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, lora)
    assert {p.device.type for n, p in adapted.named_parameters() if "lora" in n} == {"cpu"}
    assert torch.equal(adapted.generate(input_ids=IDS, max_new_tokens=8), expected)
    with pytest.raises(UnsupportedModelError, match=r"prepack='only'"):
        adapted.merge_adapter()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(model: Any, kind: torch.dtype) -> None:
    before = values_of(model)
    torch.set_default_dtype(kind)
    try:
        SLOSpecGenerator(model, model, config=ONLY)
        assert_restored(model, before)
    finally:
        torch.set_default_dtype(torch.float32)
