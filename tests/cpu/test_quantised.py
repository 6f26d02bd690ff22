"""Quantised weights: the packed layout and the kernel, against dequantised products."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hf_slospec.cpu import operators
from hf_slospec.cpu.formats import GGUF_TYPES, codes_of_gguf, codes_of_torchao
from hf_slospec.cpu.quantised import FLOAT8, Codes, PackedMatrix, quantise
from hf_slospec.errors import UnsupportedModelError

OUTPUTS, INPUTS = 88, 512  # five and a half blocks


@pytest.fixture(scope="module", autouse=True)
def library():
    operators.build()
    operators.load()


def error_of(matrix, weight, x, bias=None):
    """Return the relative error of a product against one in fp64."""
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.to(x.dtype).double()
    return float((matrix(x, bias).double() - expected).norm() / expected.norm())


def gguf_weight(name, seed=0):
    """Return a weight in a GGUF type: bytes, and what the gguf package dequantises them to."""
    weight = np.random.default_rng(seed).normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    try:
        data = gguf.quantize(weight, kind)
    except NotImplementedError:  # the package only reads K types: random bytes with finite scales
        data = np.random.default_rng(seed).integers(
            0, 256, (OUTPUTS, INPUTS // 256, GGUF_TYPES[name][0]), dtype=np.uint8
        )
        scale_at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[name]
        for at in scale_at:
            normal = np.random.default_rng(at).normal(size=data.shape[:2])
            halves = (normal * 1e-3).astype(np.float16)
            data[..., at : at + 2] = halves[..., None].view(np.uint8)
        data = data.reshape(OUTPUTS, -1)
    return data, torch.from_numpy(gguf.dequantize(data, kind))


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_weights_of_gguf_files_are_read_without_rounding(name):
    data, weight = gguf_weight(name)
    matrix = PackedMatrix(codes_of_gguf(name, data))
    torch.testing.assert_close(matrix.dequantised(), weight, rtol=1e-6, atol=1e-6)
    assert matrix.num_bytes <= 1.1 * data.nbytes * 96 / OUTPUTS  # of whole blocks


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 9, 16, 17, 40, 64, 100])
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_products_are_those_of_the_dequantised_weight(name, num_rows):
    data, weight = gguf_weight(name)
    matrix = PackedMatrix(codes_of_gguf(name, data))
    torch.manual_seed(num_rows)
    bias = torch.randn(OUTPUTS)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        x = torch.randn(num_rows, INPUTS).to(dtype)
        assert error_of(matrix, weight, x, bias) < tolerance
        assert error_of(matrix, weight, x) < tolerance


@pytest.mark.parametrize(("bits", "error"), [(8, 0.006), (4, 0.1)])
def test_quantising_is_as_close_as_gguf(bits, error):
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.manual_seed(0))
    ours = PackedMatrix(quantise(weight, bits)).dequantised()
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_0
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    ours_error, theirs_error = (
        float((each - weight).norm() / weight.norm()) for each in (ours, theirs)
    )
    assert ours_error < error
    assert ours_error == pytest.approx(theirs_error, rel=0.01)
    zeros = PackedMatrix(quantise(torch.zeros(16, 32), bits))
    assert not zeros.dequantised().any()


def test_rows_are_those_of_the_indices():
    data, weight = gguf_weight("Q6_K")
    matrix = PackedMatrix(codes_of_gguf("Q6_K", data))
    indices = torch.tensor([[0, 87], [16, 3]])
    torch.testing.assert_close(matrix.rows(indices), weight[indices])
    with pytest.raises(IndexError, match="row 88 of 88"):
        matrix.rows(torch.tensor([88]))


def test_what_cannot_be_packed():
    with pytest.raises(UnsupportedModelError, match="type IQ2_XS are not supported; use one of"):
        codes_of_gguf("IQ2_XS", np.zeros((16, 74), np.uint8))
    with pytest.raises(OverflowError, match="no groups of 32 in 40 inputs"):
        quantise(torch.zeros(16, 40), 8)
    with pytest.raises(OverflowError, match="no groups of 32"):
        PackedMatrix(Codes(8, torch.zeros(16, 40, dtype=torch.int8), torch.zeros(16, 1)))


TORCHAO = {
    "int8": lambda q: q.Int8WeightOnlyConfig(),
    "int8-tensor": lambda q: q.Int8WeightOnlyConfig(granularity=q.PerTensor()),
    "int8-group": lambda q: q.Int8WeightOnlyConfig(granularity=q.PerGroup(64)),
    "int4": lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
    "int4-asymmetric": lambda q: q.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=q.PerGroup(128), mapping_type=q.MappingType.ASYMMETRIC
    ),
    "float8": lambda q: q.Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("name", TORCHAO)
def test_weights_of_torchao_are_read_without_rounding(name):
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS)).requires_grad_(False)
    with torch.no_grad():
        layer[0].weight[0, :9] *= 1e-3  # subnormal numbers of float8
    quantization.quantize_(layer, TORCHAO[name](quantization))
    weight = layer[0].weight
    matrix = PackedMatrix(codes_of_torchao(weight)())
    assert matrix.bits == {"int8": 8, "int4": 4, "float8": FLOAT8}[name.partition("-")[0]]
    expected = weight.dequantize()
    torch.testing.assert_close(matrix.dequantised(), expected, rtol=1e-6, atol=1e-7)
    for num_rows in (1, 3, 17, 70):
        x = torch.randn(num_rows, INPUTS)
        assert error_of(matrix, expected, x, layer[0].bias) < 3e-6
        assert error_of(matrix, expected, x.bfloat16(), layer[0].bias) < 4e-3


def test_weights_that_quantise_activations_are_left():
    quantization = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS))
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    assert codes_of_torchao(layer[0].weight) is None
    assert codes_of_torchao(torch.nn.Parameter(torch.zeros(16, 32))) is None
