"""Operators of compiled forwards: attention against every token alone, and linear layers against
torch's.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.cpu import operators
from hf_slospec.cpu.operators import plan_for_operators
from hf_slospec.cpu.quantised import Codes, PackedMatrix, dense
from hf_slospec.model import noise as noise_module
from hf_slospec.model.batch import AttentionRules
from tests.support.breadth import quick_or
from tests.support.oracles.attention_rows import (
    BRANCHING,
    CHAIN,
    OPTIONS,
    ROOT,
    TOLERANCE,
    TREES,
    case,
)

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="forwards are compiled with g++"
)
SPANS = [
    (7, 1, BRANCHING),
    (0, 3, CHAIN),
    (5, 1, ROOT),
    (130, 70, ROOT),
]  # committed, in a chain, the tree at its end
SHAPES = [
    (4, 2, 16, 16),
    (6, 2, 24, 8),
    (3, 1, 7, 5),
    (4, 1, 80, 72),
]  # query heads, KV heads, key_dim, value_dim


@pytest.fixture(scope="module", autouse=True)
def _library():
    operators.build()
    operators.load()


def check(  # type: ignore[no-untyped-def]
    spans,
    heads,
    dtype=torch.float32,
    window=None,
    softcap=None,
    has_sinks=False,
    chunk=None,
    is_invariant=False,
):
    num_heads, num_kv_heads, key_dim, value_dim = heads
    made = case(spans, num_kv_heads, key_dim, value_dim, dtype)
    num_tokens = len(made.tokens)
    query = torch.randn(num_heads, num_tokens, key_dim, dtype=dtype)
    sinks = torch.randn(num_heads) if has_sinks else None
    rules = AttentionRules(key_dim**-0.5, window, softcap, sinks, chunk)
    expected = made.expected(query, rules)
    pairs = zip(made.row.spans, made.row.visible, strict=True)
    own = torch.cat([torch.arange(v.stop - s.num_tokens, v.stop) for s, v in pairs])
    key, value = (
        stored[own].transpose(0, 1)[None].contiguous() for stored in (made.keys, made.values)
    )
    made.keys[own], made.values[own] = torch.nan, torch.nan  # the operator writes them
    context = operators.Context(is_invariant)
    torch.ops.hf_slospec.set_pool(context._id, [made.keys], [made.values])
    torch.ops.hf_slospec.set_plan(context._id, *plan_for_operators(made.row))
    padded = [torch.nn.functional.pad(tensor, (0, 0, 0, 2)) for tensor in (query[None], key, value)]
    others = rules.scaling, window or 0, chunk or 0, softcap or 0.0, sinks
    out = torch.ops.hf_slospec.attend(*padded, context.tensor, 0, True, *others)
    assert out.dtype == dtype and out.shape == (1, num_tokens + 2, num_heads, value_dim)
    assert not out[0, num_tokens:].any()  # padding
    atol = TOLERANCE[dtype] * float(made.values[own].abs().max())
    torch.testing.assert_close(out[0, :num_tokens].float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention(heads, dtype, options):
    check(SPANS, heads, dtype, **options)


@settings(max_examples=quick_or(20, 60))
@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 90), st.sampled_from(TREES)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(SHAPES),
    st.sampled_from(list(OPTIONS.values())),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_attention_of_any_batch(spans, heads, options, dtype, is_invariant):
    check(spans, heads, dtype, **options, is_invariant=is_invariant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [(), (0, 1, 2), (1,)], ids=str)
def test_joined_linear_layers(packed, dtype):
    plain = [torch.randn(rows, 64, dtype=dtype) for rows in (96, 32, 40)]
    weights = [PackedMatrix(dense(w)) if i in packed else w for i, w in enumerate(plain)]
    context = operators.Context()
    context.set_linear(3, weights)
    for num_tokens in (1, 3, 17, 40, 700):
        x = torch.randn(1, num_tokens, 64, dtype=dtype)
        out = torch.ops.hf_slospec.context_linear(x, context.tensor, 3, 168)
        expected = torch.nn.functional.linear(x.float(), torch.cat(plain).float())
        torch.testing.assert_close(
            out.float(), expected, rtol=1e-2, atol=1e-4 if dtype == torch.float32 else 0.2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_quantised_layers(dtype):
    matrices = []
    for bits, outputs in ((4, 88), (8, 40), (5, 16)):
        codes = torch.randint(0, 16, (outputs, 96)).to(torch.int8 if bits == 8 else torch.uint8)
        minima = torch.rand(outputs, 3) if bits == 5 else None
        matrices.append(
            PackedMatrix(Codes(bits, codes, torch.rand(outputs, 3) / 10, minima=minima))
        )
    context = operators.Context()
    context.set_linear(0, matrices)
    weight = torch.cat([matrix.dequantised() for matrix in matrices])
    for num_tokens in (1, 2, 9, 70):
        x = torch.randn(1, num_tokens, 96, dtype=dtype)
        out = torch.ops.hf_slospec.context_linear(x, context.tensor, 0, 144)
        close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=0.1)
        torch.testing.assert_close(out.float(), x.float() @ weight.T, **close)
        parts = [matrix(x) for matrix in matrices]
        torch.testing.assert_close(out, torch.cat(parts, -1), rtol=0, atol=0)


@pytest.mark.parametrize("packs", [False, True])
def test_padding_of_a_single_token_is_not_multiplied(packs):
    weight = torch.randn(32, 64)
    context = operators.Context()
    context.set_linear(0, [PackedMatrix(dense(weight)) if packs else weight])
    x = torch.randn(1, 2, 64)
    x[0, 1] = torch.nan

    def outputs(spans):
        made = case(spans, 1, 8, 8, torch.float32)
        torch.ops.hf_slospec.set_plan(context._id, *plan_for_operators(made.row))
        return torch.ops.hf_slospec.context_linear(x, context.tensor, 0, 32)[0]

    out = outputs([(7, 1, ROOT)])
    torch.testing.assert_close(out, (x[0, :1] @ weight.T).expand(2, -1), rtol=1e-5, atol=1e-5)
    assert outputs([(7, 1, ROOT), (3, 1, ROOT)])[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(70, 24), (64, 10), (3, 2), (200, 130), (150, 64)], ids=str)
def test_invariant_products_of_dense_weights(shape, dtype):
    weight = torch.randn(shape, dtype=dtype)
    x = torch.randn(300, shape[1], dtype=dtype)
    matrix = PackedMatrix(dense(weight), is_invariant=True)
    out = matrix(x)
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, **tolerance)
    for num_rows in (*range(1, 20), 31, 64, 70, 131):  # whatever the others are
        assert torch.equal(matrix(x[:num_rows]), out[:num_rows])
    transposed = x.T.contiguous().T
    exact = x.double() @ weight.double().T + weight[:, 0].double()
    torch.testing.assert_close(matrix(transposed, weight[:, 0]).double(), exact, **tolerance)
    for span in (2, 8, 64):
        chunked = PackedMatrix(dense(weight, span), is_invariant=True)
        torch.testing.assert_close(chunked(x).double(), x.double() @ weight.double().T, **tolerance)
        assert torch.equal(chunked(x[:5]), chunked(x)[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(70, 64), (500, 96), (16, 32), (3, 6), (49, 130)], ids=str)
def test_products_of_dense_weights(shape, dtype):
    weight = torch.randn(shape, dtype=dtype)
    matrix = PackedMatrix(dense(weight))
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-2, atol=2e-2)
    for num_rows in (*range(1, 20), 31, 32, 33, 63, 64, 65, 130):
        x = torch.randn(num_rows, shape[1], dtype=dtype)
        torch.testing.assert_close(matrix(x).double(), x.double() @ weight.double().T, **tolerance)


def test_products_refuse_other_dtypes_and_odd_inputs():
    with pytest.raises(OverflowError, match="no pairs in 3 inputs"):
        PackedMatrix(dense(torch.randn(4, 3, dtype=torch.bfloat16)))
    with pytest.raises(RuntimeError, match="a product of Float"):
        PackedMatrix(dense(torch.randn(4, 4).half()))(torch.randn(1, 4))


def test_operators_refuse_wrong_sizes_and_contexts():
    context = operators.Context()
    context.set_linear(0, [torch.randn(8, 4)])
    with pytest.raises(RuntimeError, match="has 8 outputs, not 9"):
        torch.ops.hf_slospec.context_linear(torch.randn(2, 4), context.tensor, 0, 9)
    with pytest.raises(RuntimeError, match="no context -1"):
        torch.ops.hf_slospec.context_linear(torch.randn(2, 4), torch.tensor([-1]), 0, 8)


def test_contexts_are_freed():
    context = operators.Context()
    tensor = context.tensor
    del context
    with pytest.raises(RuntimeError, match="no context"):
        torch.ops.hf_slospec.context_linear(torch.randn(2, 4), tensor, 0, 8)


def test_the_library_leaves_denormal_numbers_alone():
    """A library that was linked with -ffast-math would set them to zero in the whole process."""
    code = (
        f"import torch; torch.ops.load_library({str(operators.library_path())!r}); "
        "assert (torch.tensor([1e-40]) * 1).item() > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cpp_compiler_ends_with_the_process_that_started_it(tmp_path):
    """g++ starts other processes, which it leaves behind if it is killed."""
    started = tmp_path / "pid"
    command = "sh", "-c", f"sleep 3600 & echo $! > {started}.new; mv {started}.new {started}; wait"
    code = (
        "import subprocess\n"
        f"subprocess.run(['sh', '-c', {operators.GUARD!r}, 'sh', *{command!r}], start_new_session=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not started.exists():
            time.sleep(0.1)
        parent.kill()
    while Path(f"/proc/{int(started.read_text())}").exists():
        time.sleep(0.1)


@pytest.mark.parametrize("seed", range(quick_or(3, 50)))
def test_noise_has_the_bits_of_torch(seed):
    """Also where numbers are drawn in between, and the generator is left in the same state."""
    sizes = random.Random(seed).choices((1, 2, 311, 312, 1024, 49152, 151_936), k=20)
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for size in sizes:
        expected = torch.empty(2, size).exponential_(1, generator=generators[0])
        noise = torch.empty(2, size)
        torch.ops.hf_slospec.exponential_(noise, generators[1])
        assert torch.equal(noise.view(torch.int32), expected.view(torch.int32))
        between = [torch.rand(3, generator=generator) for generator in generators]
        assert torch.equal(*between)
        assert torch.equal(*[generator.get_state() for generator in generators])


@pytest.mark.parametrize("fault", [None, "noise", "state", "token"])
def test_operators_with_other_bits_are_not_used(monkeypatch, fault):
    class Operators(noise_module.TorchOperators):
        def exponential_(self, noise, generator):
            super().exponential_(noise, generator)
            if fault == "state":
                torch.rand(1, generator=generator)
            if fault == "noise":
                noise[-1, -1] = noise[-1, -1].nextafter(torch.tensor(9.0))

        def choose(self, probs, noise):
            return super().choose(probs, noise) + (fault == "token")

    monkeypatch.setattr(noise_module, "_on_cpus", noise_module.BY_TORCH)
    operators = Operators()
    noise_module.use_operators(operators)
    assert noise_module._on_cpus is (noise_module.BY_TORCH if fault else operators)
    noise_module.use_operators(torch.ops.hf_slospec)
    assert noise_module._on_cpus is torch.ops.hf_slospec


@settings(deadline=None, max_examples=quick_or(30, 300))
@given(st.integers(1, 5), st.integers(1, 1300), st.integers(0, 2**31), st.booleans())
def test_tokens_are_those_of_multinomial(num_rows, size, seed, has_ties):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(num_rows, size, generator=generator).mul(9).softmax(-1)
    noise = torch.empty(num_rows, size).exponential_(1, generator=generator)
    if has_ties:
        probs, noise = probs.mul(8).round().div(8), noise.ceil()
    chosen = torch.ops.hf_slospec.choose(probs, noise.unbind())
    assert torch.equal(chosen, (probs / noise).argmax(-1))
    for value in torch.nan, torch.inf, -torch.nan:
        probs[0, size // 2] = value
        chosen = torch.ops.hf_slospec.choose(probs, noise.unbind())
        assert torch.equal(chosen, noise_module.BY_TORCH.choose(probs, noise.unbind()))
