"""Linear layers with prepacked weights equal plain ones, also after their weights change."""

from __future__ import annotations

import copy
import gc
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
def test_packed_layers_equal_plain_ones(monkeypatch, kernel, dtype, bias, sizes, shape):
    force_kernel(monkeypatch, kernel)
    module = linear(*sizes, bias, dtype)
    input = rows(*shape, sizes[0], dtype=dtype)
    ours = computed(module, input, packed(module))
    plain = module(input).detach()
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert packed(module).kernels == {kernel: 1}
    torch.testing.assert_close(ours, plain)


def test_layers_without_a_kernel_are_not_packed(monkeypatch):
    force_kernel(monkeypatch, "none")
    assert not copies(packed(linear()))


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
def test_layers_changed_after_packing_compute_themselves(change):
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


def test_copies_are_shared_and_freed_with_their_last_user():
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


def test_layers_without_a_plain_weight_are_not_packed():
    inferred, compiled, empty = (linear() for _ in range(3))
    with torch.inference_mode():
        inferred.weight = nn.Parameter(torch.ones(40, 24), requires_grad=False)
    compiled.compile(backend="eager")
    empty.weight = nn.Parameter(torch.ones(0, 24))
    for module in (inferred, compiled, empty, linear(dtype=torch.float64), nn.Conv1d(3, 3, 1)):
        assert not copies(packed(module)), module


@pytest.mark.parametrize(("kernel", "dtype"), WORKING)
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "gpt2"])
def test_fused_experts_and_transposed_weights(monkeypatch, family, kernel, dtype):
    force_kernel(monkeypatch, kernel)
    model = copy.deepcopy(tiny_model(family)).to(dtype)
    layers = packed(model)
    linears = [m for m in model.modules() if type(m) in (nn.Linear, Conv1D)]
    assert layers.layers.keys() >= set(linears)
    assert layers.num_bytes > sum(m.weight.nbytes for m in linears) or family == "gpt2"
    used = set[PackedWeight]()
    product = PackedWeight.product
    monkeypatch.setattr(
        PackedWeight, "product", lambda copy, *given: used.add(copy) or product(copy, *given)
    )
    ids = torch.arange(3, 20)[None]
    plain = model(ids).logits.detach()
    assert not used
    ours = computed(model, ids, layers).logits
    assert used == set(copies(layers))
    atol = (1e-4 if dtype == torch.float32 else 0.1) * float(plain.abs().max())
    torch.testing.assert_close(ours, plain, rtol=0, atol=atol)


def test_parallel_experts_are_not_packed():
    model = copy.deepcopy(tiny_model("mixtral"))
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    assert all(isinstance(layer, nn.Linear) for layer in packed(model).layers)
