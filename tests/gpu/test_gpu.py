"""Tests that need a CUDA device; `python -m pytest -m gpu` runs these alone."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedOptionError,
    divergence_report,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cuda.few_row_kernels import gated_product, invariant_product, joint_products
from hf_slospec.cuda.fused_kernels import SILU, rotate
from hf_slospec.cuda.fused_layers import FusedLayers
from hf_slospec.cuda.tree_attention import TreeAttention
from hf_slospec.model.linear_overrides import OverrideOptions
from tests.support.cuda_tests import (  # noqa: F401  collected here
    CUDA,
    TOLERANCE,
    check_row,
    check_self,
    moved,
    on_cuda,
    serve,
    test_a_capture_that_fails_leaves_cuda_usable,
    test_an_answer_one_question_late,
    test_auto_is_the_faster_of_triton_and_flash,
    test_drafting_and_verifying_wait_for_nothing,
    test_fp32_token_for_token_by_sdpa,
    test_pieces_of_few_keys,
    test_replays_are_what_forwards_compute,
    test_too_much_memory_ends_it,
)
from tests.support.model_classes import SUPPORT
from tests.support.oracles.attention_rows import ROWS, TREES
from tests.support.oracles.layer_parity import compare_layers
from tests.support.packed import overridden, packed_model
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import ragged_texts, sharpened, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        "default"
    ),  # the stacks of CUDA machines warn of much that is not ours
]
CAUSAL = SUPPORT.read_text(encoding="utf-8").split("\n## Image-text models\n")[0]
JOINT = (torch.nn.Linear, "forward")
ROOT, BRANCHING, CHAIN = TREES
LONG = [(4099, 2, BRANCHING), (0, 1, CHAIN), (1500, 1, ROOT), (2000, 512, ROOT), (0, 300, ROOT)]
PLAIN = (None, None, False)  # window, softcap, sinks
EXACT = re.findall(r"^\| (\w+) \| [^|]+ \| exact \|", CAUSAL, re.MULTILINE)


def of_class(name):
    model_class = getattr(transformers, name)
    config = tiny_config(model_class.config_class)
    # Values of latent layers are views behind keys. Torch's efficient attention, which some classes
    # call by themselves, does not check that they begin at multiples of 16 bytes, and ends the
    # process's CUDA context.
    for size in ("qk_nope_head_dim", "qk_head_dim"):
        if vars(config).get(size):  # not getattr, which per-layer sizes refuse
            setattr(config, size, vars(config)[size] + 4)
    return lambda: model_class(config)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kind_of_row(kernel, dtype, window, name):
    for softcap in (None, 2.0) if kernel.has_softcap else (None,):
        for has_sinks in (False, True):
            check_row(ROWS[name], (8, 2, 64), dtype, window, softcap, has_sinks)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [PLAIN, (9, 2.0, True)], ids=["plain", "window-softcap-sinks"])
def test_every_kind_of_row_by_triton(dtype, options, name):
    check_row(ROWS[name], (8, 2, 64), dtype, *options, backend=TreeAttention())


@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 2, 8), (12, 4, 96)])
def test_long_prefixes_by_triton(heads):
    check_row(LONG, heads, torch.bfloat16, *PLAIN, backend=TreeAttention())


def test_rotary_embeddings_are_equal_bit_by_bit():
    query, key = (
        torch.randn(1, 5, n, 64, dtype=torch.bfloat16, device=CUDA).transpose(1, 2) for n in (4, 2)
    )
    cos, sin = torch.randn(2, 1, 5, 64, dtype=torch.bfloat16, device=CUDA)
    for found, right in zip(
        rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True
    ):
        assert found.equal(right)


@pytest.mark.parametrize(
    ("family", "num_places"), [("llama", 3), ("qwen3", 3), ("gemma3", 3), ("gpt2", 0)]
)
def test_layers_are_fused(family, num_places):
    model = on_cuda(tiny_model(family), torch.bfloat16)
    options = OverrideOptions("cuda", fused_layers=True)
    fused = overridden(model, FusedLayers.for_model(model, options))
    ids = torch.arange(3, 9, device=CUDA)[None]
    # Projections are joint where that is measured to be faster.
    assert len(fused.attributes) - (JOINT in fused.attributes) == num_places
    plain = model(ids).logits
    with fused.in_force():
        assert (model(ids).logits - plain).norm() < 0.03 * plain.norm()


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
@pytest.mark.parametrize("inputs", [576, 4096])
def test_products_by_several_weights(num_rows, inputs):
    rows, *weights = (
        torch.randn(n, inputs).to(CUDA, torch.bfloat16) for n in (num_rows, 4096, 1024, 576)
    )
    for out, weight in zip(joint_products(rows, weights, [None] * 3), weights, strict=True):
        torch.testing.assert_close(
            out.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.02 * inputs**0.5
        )
    gate, up = (weight / inputs**0.5 for weight in (weights[1], weights[2].repeat(2, 1)[:1024]))
    expected = torch.nn.functional.silu(rows.float() @ gate.float().T) * (
        rows.float() @ up.float().T
    )
    torch.testing.assert_close(
        gated_product(rows, gate, up, SILU).float(), expected, rtol=0.03, atol=0.03
    )


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (8, 1, 256), (12, 4, 96), (4, 2, 8)])
@pytest.mark.parametrize("window", [None, 1000])
def test_long_prefixes(kernel, heads, window):
    """Cut into pieces, and two prompts of several hundred tokens beside them."""
    check_row(LONG, heads, torch.bfloat16, window, None, False)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("attention", ["triton", "flash"])
def test_every_attention_call_of_every_class(attention, name):
    """Against 4d_mask, in bf16; a layer that the kernel cannot do goes to sdpa and is compared all
    the same.
    """
    model = sharpened(of_class(name), 0).to(CUDA, torch.bfloat16)
    try:
        packed_model(model, attention)
    except UnsupportedOptionError as error:
        pytest.skip(str(error))
    assert compare_layers(model, TOLERANCE[torch.bfloat16], attention) >= 2


def tiny_pair(batch, **settings):
    """Return a generator with the embedded pair in bf16, and so many prompts."""
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    texts = tiny_prompts()[:batch]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    config = SLOSpecConfig(policy="fixed", **settings)
    return SLOSpecGenerator(target.to(CUDA), draft.to(CUDA), config=config), moved(inputs)


def check_near_ties(batch, width, depth, attention):
    generator, inputs = tiny_pair(
        batch, attention=attention, max_depth=depth, max_width=width, check_invariants=True
    )
    report = divergence_report(generator, inputs, do_sample=False, max_new_tokens=64)
    assert report.all_near_ties, report


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [(1, 3, 4), (4, 4, 3), (16, 2, 5)], ids=str)
def test_bf16_differs_from_stock_at_near_ties_only(sizes):
    check_near_ties(*sizes, "flash")


@pytest.mark.parametrize("attention", ["auto", "flash", "sdpa", "4d_mask"])
def test_rows_commit_more_than_one_token_a_step(attention):
    generator, inputs = tiny_pair(8, attention=attention, max_depth=4, max_width=3)
    output = generator.generate(
        **inputs, do_sample=False, max_new_tokens=48, return_dict_in_generate=True
    )
    assert sum(row.steps for row in output.slo) < 0.6 * 8 * 47


@pytest.mark.parametrize("attention", ["triton", "flash"])
@pytest.mark.parametrize("streams", [1, 6])
def test_graphs_differ_from_stock_at_near_ties_only(captures, attention, streams):
    check_near_ties(streams, 3, 4, attention)
    assert captures


def test_the_batcher_replays(captures):
    serve(8, 40)
    assert captures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(40, 24), (1536, 4096), (4096, 14336), (1, 4096)], ids=str)
def test_products_of_a_row_are_the_same_beside_others(shape, dtype):
    outputs, inputs = shape
    rows, weight = (torch.randn(n, inputs).to(CUDA, dtype) for n in (200, outputs))
    together = invariant_product(rows, weight, weight[:, 0])
    expected = rows.double() @ weight.double().T + weight[:, 0]
    assert (together - expected).abs().max() <= TOLERANCE.get(dtype, 1e-5) * expected.abs().max()
    for begin, end in ((0, 1), (3, 20), (63, 66), (199, 200)):
        assert torch.equal(
            invariant_product(rows[begin:end], weight, weight[:, 0]), together[begin:end]
        )


@pytest.mark.parametrize("options", [PLAIN, (90, 2.0, True)], ids=["plain", "window-softcap-sinks"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 1, 256), (4, 2, 8)], ids=str)
def test_paths_equal_masks(heads, options):
    spans = [(1090, 2, BRANCHING), (0, 1, CHAIN), (63, 200, ROOT), (0, 300, ROOT)]
    check_row(spans, heads, torch.bfloat16, *options, backend=TreeAttention(by_path=True))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gpt2", "phi3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_self_is_always_the_same(dtype, family):
    """The trial of exact bits would refuse a device whose kernels depend on the batch."""
    models = [on_cuda(tiny_model(family, noise=noise), dtype) for noise in (0.0, 0.03)]
    check_self(*models, ragged_texts(5), do_sample=False, max_new_tokens=24)


@pytest.mark.parametrize(
    "options", [dict(do_sample=False), dict(do_sample=True, temperature=0.8, top_p=0.9, seed=7)]
)
def test_self_is_always_the_same_on_text(options):
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    prompts = [tokenizer(text)["input_ids"][-150:] for text in tiny_prompts()[:6]]
    check_self(target.to(CUDA), draft.to(CUDA), prompts, max_new_tokens=48, **options)
