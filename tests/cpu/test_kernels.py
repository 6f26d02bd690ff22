"""Kernels agree with torch's own and are found by trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_slospec.cpu import kernels, operators
from hf_slospec.cpu.kernels import PACKING, granularity, kernel_for, works
from tests.support.forced_kernels import WORKING

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize(("name", "dtype"), WORKING)
@pytest.mark.parametrize("sizes", [(40, 24), (1, 1), (3, 7), (129, 33), (300, 1000)])
def test_packed_weights_equal_plain_ones(name, dtype, sizes):
    weight = torch.randn(sizes).to(dtype)
    bias = torch.randn(sizes[0]).to(dtype)
    if name == "Blocks" and dtype == torch.bfloat16 and sizes[1] % 2:
        with pytest.raises(OverflowError, match="no pairs"):
            PACKING[name](weight)
        return
    matrix = PACKING[name](weight)
    for num_tokens in (1, 2, 5, 8, 17, 63, 130, 600):
        input = torch.randn(num_tokens, sizes[1]).to(dtype)
        for given in (None, bias):
            plain = F.linear(
                input.double(), weight.double(), None if given is None else given.double()
            )
            ours = matrix(input, given)
            assert ours.dtype == dtype
            assert (ours.double() - plain).abs().max() <= TOLERANCE[dtype] * plain.abs().max()
    assert weight.nbytes <= matrix.num_bytes <= weight.nbytes * -(-sizes[0] // 16) * 16 / sizes[0]


needs_fbgemm = pytest.mark.skipif(
    not works("FBGEMM", torch.bfloat16), reason="torch has no FBGEMM here"
)


@needs_fbgemm
def test_weights_in_fp16_are_multiplied_in_fp32():
    """The result is nearer to exact arithmetic than that of torch's own kernels, which round to the
    dtype.
    """
    weight = torch.randn(64, 512).bfloat16()
    input = torch.randn(8, 512).bfloat16()
    exact = F.linear(input.double(), weight.double())
    assert torch.equal(PACKING["FBGEMM"](weight)(input, None), exact.to(torch.bfloat16))


@needs_fbgemm
def test_values_that_fp16_cannot_hold_are_counted_or_refused():
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    weight[0, :3] = torch.tensor([1e-9, 3e-7, 2**-17])  # the last is exact in fp16
    assert PACKING["FBGEMM"](weight).num_rounded == 2
    for large in (1e5, float("inf"), float("nan")):
        weight[1, 1] = large
        with pytest.raises(OverflowError):
            PACKING["FBGEMM"](weight)


def test_a_kernel_that_torch_lacks_or_that_is_wrong_is_not_used(monkeypatch):
    def missing(weight):
        return torch.ops.mkldnn.no_such_operator(weight)

    class Wrong:
        num_bytes = num_rounded = 0

        def __init__(self, weight):
            self.weight = 1.1 * weight

        def __call__(self, input, bias):
            return F.linear(input, self.weight, bias)

    for kernel in (missing, Wrong):
        works.cache_clear()
        monkeypatch.setitem(PACKING, "OneDNN", kernel)
        assert not works("OneDNN", torch.float32)
    works.cache_clear()


@pytest.fixture
def _forgotten():
    works.cache_clear()
    yield
    works.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_small_weights_stay_where_the_cpu_has_their_dtype(monkeypatch):
    weights = {dtype: torch.randn(8, 8).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    large = {dtype: weight.repeat(64, 64) for dtype, weight in weights.items()}
    monkeypatch.setattr(operators, "library_path", lambda: Path("none"))
    for native in (True, False):
        monkeypatch.setattr(
            kernels, "native_dtypes", lambda native=native: {torch.bfloat16: native}
        )
        assert kernel_for(weights[torch.float32]) is None
        assert kernel_for(large[torch.float32]) == next(
            name for name in ("MKL", "OneDNN") if works(name, torch.float32)
        )
        if works("FBGEMM", torch.bfloat16):
            # oneDNN has bf16 products of its own, or emulates them slowly.
            name = "OneDNN" if native and works("OneDNN", torch.bfloat16) else "FBGEMM"
            assert kernel_for(large[torch.bfloat16]) == name
            assert kernel_for(weights[torch.bfloat16]) == (None if native else "FBGEMM")


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.skipif(operators.why_unsupported() is not None, reason="the library needs Linux")
def test_the_librarys_kernels_serve_eager_forwards_once_it_was_built():
    operators.build()
    assert kernel_for(torch.randn(512, 512)) == "Blocks"


def test_onednn_makes_kernels_for_few_numbers_of_tokens():
    larger = [tokens + -tokens % granularity(tokens) for tokens in range(1, 1025)]
    assert len(set(larger)) == 64
    assert max((now - tokens) / tokens for tokens, now in enumerate(larger, start=1)) <= 1 / 8
