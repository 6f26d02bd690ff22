"""Weights that changed are noticed, however they were written: by packed copies, and by the state
of kept K/V.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cpu.packed_weights import PackedWeight
from hf_slospec.model import checksum
from hf_slospec.model import version as weights_version
from hf_slospec.model.checksum import digest
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.tree_mask import chain
from hf_slospec.model.version import ModelVersion
from tests.support.forced_kernels import WORKING, force_kernel
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model

KERNELS = [name for name, dtype in WORKING if dtype is torch.bfloat16]
LR = 1e-6  # changes few of the weights in bf16, each by the least that it can change
Write = Callable[[Any], None]


def model_in(dtype=torch.bfloat16):
    return copy.deepcopy(tiny_model("llama")).to(dtype)


def optimizer_step(**options):
    def write(model):
        optimizer = torch.optim.AdamW(model.parameters(), LR, **options)
        ids = torch.arange(3, 40)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return write


def largest(model):
    return max(model.parameters(), key=torch.Tensor.numel).data


def one_element(model):
    weight = largest(model).view(-1)
    weight[weight.numel() // 2].mul_(1.01)


def loaded(model):
    state = copy.deepcopy(model.state_dict())
    state["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-2
    model.load_state_dict(state)


def copied_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 1.01)


WRITES: dict[str, Write] = {
    "fused AdamW": optimizer_step(fused=True),
    "one tensor at a time": optimizer_step(foreach=False, fused=False),
    "one element of data": one_element,
    "load_state_dict": loaded,
    "copy_": copied_in_place,
}


def packed_of(model, monkeypatch):
    if KERNELS:
        force_kernel(monkeypatch, KERNELS[0])
    packed = packed_model(model, prepack=True)
    assert not KERNELS or packed.overrides.layers
    return packed


def num_stale(packed):
    new = [(one, PackedWeight(one.layer, one.name)) for one in copies(packed)]
    return sum(not torch.equal(values(one), values(other)) for one, other in new)


def values(copy):
    (matrix,) = copy.matrices
    return matrix(torch.eye(copy.weight.shape[-1], dtype=copy.weight.dtype), None)


def copies(packed):
    return [copy for layer in packed.overrides.layers.values() for copy in layer.copies]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("is_training", [False, True])
def test_every_write_is_noticed_before_the_next_call(write, is_training, monkeypatch):
    model = model_in().train(is_training)
    packed = packed_of(model, monkeypatch)
    for _ in range(2):
        before = copy.deepcopy(model.state_dict())
        state = packed.version.weights
        packed.renew()
        assert packed.version.weights == state
        write(model)
        assert any(
            not torch.equal(before[name], weight) for name, weight in model.state_dict().items()
        )
        packed.renew()
        assert packed.version.weights > state and num_stale(packed) == 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_merged_adapters_are_noticed(monkeypatch):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_in(), lora)
    packed = packed_of(model.get_base_model(), monkeypatch)
    for change in (
        model.merge_adapter,
        model.unmerge_adapter,
        lambda: optimizer_step(fused=True)(model),
    ):
        state = packed.version.weights
        change()
        packed.renew()
        assert packed.version.weights > state and num_stale(packed) == 0


def test_only_what_has_changed_is_packed_again(monkeypatch):
    model = model_in()
    packed = packed_of(model, monkeypatch)
    made = {one: one.num_made for one in copies(packed)}
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    packed.renew()
    changed = [one.layer for one in copies(packed) if one.num_made > made[one]]
    assert changed == ([model.model.layers[0].mlp.up_proj] if KERNELS else [])


def test_quantised_weights_written_in_place():
    quantization = pytest.importorskip("torchao.quantization")
    model = model_in(torch.float32)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    packed = PackedModel(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    part = next(checksum._stored(weight))
    assert part is not weight and type(part) is torch.Tensor
    for write in (lambda: part.data[0, 0].add_(1), lambda: part[0, 0].sub_(1)):
        state = packed.version.weights
        packed.renew()
        assert packed.version.weights == state
        write()
        packed.renew()
        assert packed.version.weights > state


# ---- models that are not trained


def test_weights_that_are_not_trained_are_not_read_between_calls(monkeypatch):
    model = model_in().requires_grad_(False)
    packed = packed_of(model, monkeypatch)
    read = list[int]()
    monkeypatch.setattr(
        weights_version, "digest", lambda weights: read.append(len(weights)) or digest(weights)
    )
    packed.renew()
    assert not read
    one_element(model)
    hf_slospec.weights_changed()
    packed.renew()
    assert read and packed.version.weights == 1 and num_stale(packed) == 0
    packed.renew()
    assert len(read) == 1 and packed.version.weights == 1
    one_element(model)
    optimizer_step()(tiny_model("qwen2"))  # whose weights may be copied to this one
    packed.renew()
    assert len(read) == 2 and packed.version.weights == 2 and num_stale(packed) == 0


def other_storage(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def other_parameter(model):
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(2 * projection.weight.detach())


@pytest.mark.parametrize(
    "write", [optimizer_step(fused=True), copied_in_place, other_storage, other_parameter]
)
def test_the_next_forward_notices_writes_while_requests_run(write, monkeypatch):
    model = model_in()
    packed = packed_of(model, monkeypatch)
    write(model)
    with packed.kv_cache.temporary([4]) as (sequence,):
        packed.forward(packed.kv_cache.pool, [chain(packed, sequence, [5, 6])], torch.tensor([1]))
    assert packed.version.weights == 1 and num_stale(packed) == 0


def test_while_requests_run_nothing_is_read(monkeypatch):
    packed = packed_of(model_in(), monkeypatch)
    monkeypatch.setattr(
        weights_version, "digest", lambda weights: pytest.fail("the weights were read")
    )
    packed.renew(is_idle=False)


def test_drafts_are_checked_too():
    model = tiny_model("llama")
    draft = model_in(torch.float32)
    generator = SLOSpecGenerator(model, draft, config=SLOSpecConfig(max_depth=2))
    packed = generator.decoder.speculator.draft.packed  # type: ignore[union-attr]
    generator.generate(torch.arange(3, 20)[None], max_new_tokens=2)
    state = packed.version.weights
    one_element(draft)
    generator.generate(torch.arange(3, 20)[None], max_new_tokens=2)
    assert packed.version.weights == state + 1


# ---- the checksum


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(300, 777, generator=generator).bfloat16(),
        torch.randn(13, generator=generator),
        torch.randn(7, 5, generator=generator).half()[:, 1:],
        torch.tensor(3),
        torch.zeros(5, dtype=torch.bool),
        torch.randn(2**18 + 3, generator=generator),
    ]


@pytest.mark.parametrize("which", range(6))
def test_the_checksum_sees_single_bits_and_swaps(which):
    draw = random.Random(which)
    own = tensors()
    before = digest(own)
    assert before == digest(tensors())
    for _ in range(40):
        changed = tensors()
        weight = changed[which] = changed[which].contiguous()
        bits = weight.view(-1).view(torch.uint8)
        if draw.random() < 0.5 and weight.numel() > 1:
            flat = weight.view(-1)
            a, b = draw.sample(range(len(flat)), 2)
            flat[[a, b]] = flat[[b, a]]
        else:
            bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(
                8 if weight.dtype is not torch.bool else 1
            )
        assert (digest(changed) == before) == torch.equal(weight, own[which])


def test_the_checksum_sees_changes_that_cancel_out():
    draw = random.Random(0)
    before = digest(tensors())
    for _ in range(100):
        changed = tensors()
        bits = changed[0].view(-1).view(torch.int16)
        a, b = draw.sample(range(len(bits)), 2)
        bits[a] += 1
        bits[b] -= 1
        assert digest(changed) != before


def test_parts_of_larger_tensors_at_any_place():
    storage = torch.randn(100).bfloat16()
    for begin in range(4):
        part = storage[begin : begin + 50]
        assert digest([part]) == digest([part.clone()])


def test_writes_to_inference_tensors_are_noticed():
    with torch.inference_mode():
        model = model_in()
    version = ModelVersion(model)
    assert not version.renew()
    with torch.inference_mode():
        largest(model)[0, 0] += 1
    assert version.renew()
