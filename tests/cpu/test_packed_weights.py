"""Linear layers with prepacked weights equal plain ones, also after their weights change."""

from __future__ import annotations

import copy
import gc
import threading
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured
from transformers.pytorch_utils import Conv1D

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cpu import packed_weights
from hf_slospec.cpu.packed_weights import PackedWeight, PackedWeights
from tests.support.forced_kernels import WORKING, force_kernel
from tests.support.packed import CHANGED, overridden, packed_model
from tests.support.toys.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not WORKING, reason="no kernels for packed weights on this machine")


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    """Pack every weight, however small."""
    force_kernel(monkeypatch, WORKING[0][0])


def linear(inputs=24, outputs=40, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias, dtype=dtype)


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def packed(module, wanted=True, autocast=None):
    return overridden(module, PackedWeights(module, wanted, autocast))


def copies(overrides):
    return [copy for layer in overrides.layers.values() for copy in layer.copies]


def computed(module, input, linears):
    with torch.no_grad(), linears.in_force():
        return module(input)


@pytest.mark.parametrize(("kernel", "dtype"), WORKING)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(24, 40), (1, 1), (7, 3), (33, 129)])
@pytest.mark.parametrize(
    "shape", [(1,), (1, 1), (5,), (2, 3), (1, 0), (1, 17), (3, 43), (1, 130), (1, 600)]
)
def test_a_layer_gives_what_a_plain_one_gives(monkeypatch, kernel, dtype, bias, sizes, shape):
    force_kernel(monkeypatch, kernel)
    module = linear(*sizes, bias, dtype)
    input = rows(*shape, sizes[0], dtype=dtype)
    ours = computed(module, input, packed(module))
    plain = module(input).detach()
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert packed(module).kernels == {kernel: 1}
    torch.testing.assert_close(ours, plain)


def test_inputs_need_not_be_contiguous():
    module = linear()
    input = rows(24, 6).T
    torch.testing.assert_close(computed(module, input, packed(module)), module(input).detach())


def test_torch_computes_where_it_is_faster(monkeypatch):
    module = linear()
    calls = list[int]()
    force_kernel(monkeypatch, WORKING[0][0], is_faster=(False, True, True, True, True, False))
    layers = packed(module)
    (copy,) = copies(layers)
    kernel = copy.matrices[0]
    copy.matrices = [lambda input, bias: calls.append(len(input)) or kernel(input, bias)]
    for num_tokens in (1, 2, 4, 5, 64, 65, 300):
        computed(module, rows(1, num_tokens, 24), layers)
    assert calls == [2, 4, 5, 64]


def test_only_layers_whose_kernel_is_faster_are_packed(monkeypatch):
    force_kernel(monkeypatch, "none")
    assert not copies(packed(linear()))


def multiply(weight):
    with torch.no_grad():
        weight.mul_(2)


def test_other_threads_compute_plainly_meanwhile(monkeypatch):
    module = linear()
    input = rows(3, 24)
    found = list[torch.Tensor]()
    layers = packed(module)
    (copy,) = copies(layers)
    monkeypatch.setattr(
        copy, "product", lambda *_: pytest.fail("another thread's forward was ours")
    )
    plain = nn.Linear.forward
    with layers.in_force():
        assert nn.Linear.forward is not plain
        thread = threading.Thread(target=lambda: found.append(module(input)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], F.linear(input, module.weight))


def test_another_threads_forward_may_end_later():
    module = linear()
    input = rows(3, 24)
    with packed(module).in_force():
        forward = module.forward
    assert torch.equal(forward(input), module(input))


def test_nothing_stays_on_the_class():
    module = nn.Sequential(linear(), nn.ReLU())
    linears = packed(module)
    others = packed(module)
    plain = nn.Linear.forward
    with pytest.raises(KeyError), linears.in_force(), others.in_force():  # two, and an error
        raise KeyError
    assert nn.Linear.forward is plain
    with linears.in_force():
        with others.in_force():
            pass
        assert nn.Linear.forward is not plain  # the other one still runs
    assert nn.Linear.forward is plain


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrise(module):
    register_parametrization(module, "weight", Doubled())


def prune_half(module):
    l1_unstructured(module, "weight", 0.5)


def replace_forward(module):
    module.forward = lambda input: 3 * F.linear(input, module.weight)


def hook(module):
    module.register_forward_hook(lambda module, given, output: -output)


@pytest.mark.parametrize(
    "change", [parametrise, prune_half, replace_forward, hook, nn.Linear.double]
)
def test_what_becomes_of_a_layer_later_is_kept(change):
    module = linear()
    linears = packed(module)
    computed(module, rows(3, 24), linears)
    change(module)
    linears.renew(CHANGED)
    assert not linears.layers
    input = rows(3, 24, dtype=next(module.parameters()).dtype)
    plain = module(input).detach()
    assert torch.equal(computed(module, input, linears), plain)


def test_copies_serve_the_autocast_that_they_were_made_for():
    module = linear(bias=True)
    input = rows(3, 24)
    dtype = torch.bfloat16
    own = packed(module)
    cast = packed(module, autocast=dtype)
    assert len(own.layers) == 1
    with torch.autocast("cpu", dtype):
        expected = module(input).detach()
        assert torch.equal(computed(module, input, own), expected)
        torch.testing.assert_close(computed(module, input, cast), expected)
        assert expected.dtype is dtype
    assert torch.equal(computed(module, input, cast), module(input).detach())


def test_layers_that_come_and_go():
    model = nn.Sequential(linear(), nn.Linear(40, 8))
    linears = packed(model)
    gone, model[1] = ref(model[1]), nn.Linear(40, 16)
    assert computed(model, rows(3, 24), linears).shape == (3, 16)
    linears.renew(CHANGED)
    assert gone() is None and len(linears.layers) == 2


def test_copies_are_shared_by_all_who_forward_a_model_and_go_with_them():
    model = copy.deepcopy(tiny_model("llama"))
    first, second = (packed_model(model, prepack=True).overrides for _ in range(2))
    assert copies(first) == copies(second) != []
    weights = {id(m.weight): m.weight.nbytes for m in model.modules() if type(m) is nn.Linear}
    assert first.num_bytes == sum(weights.values())
    packed_copies = [ref(one) for one in copies(first)]
    del first
    assert all(one() is not None for one in packed_copies)
    del second
    gc.collect()
    assert all(one() is None for one in packed_copies)


def test_copies_of_a_target_that_drafts_for_itself_count_once():
    model = tiny_model("llama")
    linears = packed_model(model, prepack=True).overrides
    gen = SLOSpecGenerator(
        model, model, config=SLOSpecConfig(max_depth=2, prepack=True, compile=False)
    )
    assert gen.decoder.speculator.memory(0).prepacked == linears.num_bytes > 0


def test_copies_take_a_share_of_the_free_memory_at_most(monkeypatch, caplog):
    monkeypatch.setattr(packed_weights, "FREE_SHARE", 0.0)
    with caplog.at_level("INFO"):
        assert not copies(packed(linear(), None))
    assert "SLOSpecConfig(prepack=True)" in caplog.text
    assert len(copies(packed(linear()))) == 1
    assert not copies(packed(linear(), False))


def test_what_is_more_than_a_plain_layer_is_left_alone():
    hooked = linear()
    replaced = linear()
    inferred = linear()
    compiled = linear()
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda input: input
    with torch.inference_mode():
        inferred.weight = nn.Parameter(torch.ones(40, 24), requires_grad=False)
    compiled.compile(backend="eager")
    empty = linear()
    empty.weight = nn.Parameter(torch.ones(0, 24))
    for module in (
        hooked,
        replaced,
        inferred,
        compiled,
        empty,
        linear(dtype=torch.float64),
        nn.Conv1d(3, 3, 1),
    ):
        assert not copies(packed(module)), module


@pytest.mark.parametrize(("kernel", "dtype"), WORKING)
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "gpt2"])
def test_fused_experts_and_transposed_weights(monkeypatch, family, kernel, dtype):
    force_kernel(monkeypatch, kernel)
    model = copy.deepcopy(tiny_model(family)).to(dtype)
    layers = packed(model)
    assert (
        layers.num_bytes > sum(m.weight.nbytes for m in model.modules() if type(m) is nn.Linear)
        or family == "gpt2"
    )
    assert not any(
        type(m) in (nn.Linear, Conv1D) and m not in layers.layers for m in model.modules()
    )
    used = set[PackedWeight]()
    product = PackedWeight.product
    monkeypatch.setattr(
        PackedWeight, "product", lambda copy, *given: used.add(copy) or product(copy, *given)
    )
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        plain = model(ids).logits
        assert not used
        with layers.in_force():
            ours = model(ids).logits
    assert used == set(copies(layers))
    torch.testing.assert_close(
        ours, plain, rtol=0, atol={torch.float32: 1e-4}.get(dtype, 0.1) * float(plain.abs().max())
    )


def test_parallel_experts_are_left_alone():
    model = copy.deepcopy(tiny_model("mixtral"))
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    assert all(isinstance(layer, nn.Linear) for layer in packed(model).layers)
