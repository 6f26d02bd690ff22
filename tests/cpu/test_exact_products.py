"""Exact products of linear layers: every row has the bits of its own product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.cpu import exact as exact_products
from hf_slospec.cpu.exact import ExactProducts, product_kind
from tests.support.packed import CHANGED, overridden

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 64), (192, 576), (96, 1536), (40, 3072), (40, 24)]


def cancelling(shape, num_rows, dtype):
    """Return a weight and rows [1, num_rows, inputs] whose products are rounding errors, which any
    order changes.
    """
    outputs, inputs = shape
    weight = torch.randn(outputs, inputs // 2)
    rows = torch.randn(1, num_rows, inputs // 2)
    order = torch.randperm(inputs // 2 * 2)
    weight = torch.cat((weight, weight), 1)[:, order]
    rows = torch.cat((rows, -rows), 2)[..., order]
    return F.pad(weight, (0, inputs % 2)).to(dtype), F.pad(rows, (0, inputs % 2)).to(dtype)


def fresh(tensor):
    """Return a copy as an operation would allocate it; strides of dimensions of size 1 matter to
    some kernels.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@pytest.fixture(params=[True, False], ids=["own kernel", "torch only"])
def _kernels(request, monkeypatch):
    product_kind.cache_clear()
    if not request.param:
        monkeypatch.setattr(exact_products, "_has_operators", lambda: False)
    yield
    product_kind.cache_clear()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("as_one", [True, False])
def test_rows_do_not_depend_on_others(shape, dtype, as_one):
    (weight, x) = cancelling(shape, 75, dtype)
    bias = torch.randn(shape[0]).to(dtype)
    products = overridden(nn.Module(), ExactProducts(as_one))
    for added in (None, bias, 1e-6 * bias):
        with products.in_force():
            together = F.linear(x, weight, added)
            for begin, end in ((0, 1), (3, 20), (40, 75)):
                assert torch.equal(
                    F.linear(fresh(x[:, begin:end]), weight, added), together[:, begin:end]
                )
            assert F.linear(x[0], weight).shape == (75, shape[0])
        if as_one:
            rows = [F.linear(fresh(row), weight, added) for row in x.split(1, dim=1)]
            assert torch.equal(together, torch.cat(rows, dim=1))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_with_transposed_weights(dtype):
    layer = Conv1D(96, 640).to(dtype).requires_grad_(False)
    weight, x = cancelling((96, 640), 37, dtype)
    layer.weight.copy_(weight.T)
    with overridden(layer, ExactProducts(as_one=True)).in_force():
        together = layer(x)
    assert torch.equal(together, torch.cat([layer(fresh(row)) for row in x.split(1, dim=1)], dim=1))


def test_changed_weights_are_noticed():
    weight = torch.randn(64, 576).bfloat16()
    x = torch.randn(1, 5, 576).bfloat16()
    products = overridden(nn.Module(), ExactProducts(as_one=False))
    with products.in_force():
        before = F.linear(x, weight)
        weight.mul_(2)
        products.renew(CHANGED)
        assert torch.equal(F.linear(x, weight), 2 * before)
    weight.data = weight.data * 2  # another address
    products.renew(CHANGED)
    with products.in_force():
        assert torch.equal(F.linear(x, weight), 4 * before)
