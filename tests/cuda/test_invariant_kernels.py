"""The Triton product with fixed tiles, run by Triton's interpreter: a row has the same bits beside
any others.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from hf_slospec.cuda.few_row_kernels import BLOCK_M, invariant_product

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled: see tests/gpu"
)
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # share of the largest value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (96, 200)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products(shape, dtype, is_transposed):
    outputs, inputs = shape
    rows = torch.randn(BLOCK_M + 9, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    weight = (
        torch.randn(inputs, outputs).to(dtype).T
        if is_transposed
        else torch.randn(outputs, inputs).to(dtype)
    )
    for added in (None, bias):
        together = invariant_product(rows, weight, added)
        expected = F.linear(rows.float(), weight.float(), None if added is None else added.float())
        assert together.dtype == dtype and not together.isnan().any()
        assert (together.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
        for begin, end in ((0, 1), (3, 20), (BLOCK_M - 1, BLOCK_M + 2), (BLOCK_M + 8, BLOCK_M + 9)):
            assert torch.equal(
                invariant_product(rows[begin:end], weight, added), together[begin:end]
            )
