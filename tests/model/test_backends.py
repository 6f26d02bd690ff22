"""One parity suite for all attention backends: every token of packed rows against itself alone."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
import transformers

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedOptionError,
)
from hf_slospec.cuda import flash as packing
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.cuda.flash import merged_attention
from hf_slospec.cuda.flash_attention import FlashAttention, kernel_on
from hf_slospec.model.attention.sdpa import masked_attention, sdpa_attention
from hf_slospec.model.batch import AttentionRules, CachedSequence, PackedBatch, Span
from hf_slospec.model.packed_model import PackedModel
from tests.support.model_classes import EXACT
from tests.support.oracles.attention_rows import BRANCHING, CHAIN, ROOT, ROWS, SPANS, case
from tests.support.oracles.layer_parity import compare_layers
from tests.support.packed import packed_model
from tests.support.stand_ins import flash as flash_stand_in
from tests.support.stand_ins.flash import StandIn
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import (
    sharpened,
    tiny_model,
)

NUM_HEADS = 4
NUM_KV_HEADS = 2
DIM = 8


STAND_INS = [StandIn, flash_stand_in.EmptyIsMinusInfinity, flash_stand_in.EmptyIsZero]


@pytest.fixture(params=STAND_INS)
def stand_in(request, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", (request.param,))


def agrees(backend, made, window=None, softcap=None, has_sinks=False, chunk=None):
    query = torch.randn(NUM_HEADS, len(made.tokens), made.keys.shape[-1])
    sinks = torch.randn(NUM_HEADS) if has_sinks else None
    rules = AttentionRules(0.3, window, softcap, sinks, chunk)
    out = backend(query, made.keys, made.values, made.row, rules)
    assert out.shape == (len(made.tokens), NUM_HEADS, made.values.shape[-1])
    torch.testing.assert_close(out, made.expected(query, rules))


@pytest.mark.parametrize("window", [None, 1, 4, 9, 40])
@pytest.mark.parametrize(
    ("softcap", "has_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)]
)
@pytest.mark.parametrize("backend", [masked_attention, sdpa_attention, FlashAttention("stand-in")])
def test_every_kind_of_row(backend, window, softcap, has_sinks, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    for name, spans in ROWS.items():
        agrees(
            backend,
            case(spans, NUM_KV_HEADS, DIM, DIM, in_order=name != "every-kind"),
            window,
            softcap,
            has_sinks,
        )


def test_a_bias_by_distance():
    bias = torch.randn(NUM_HEADS, 6)  # most keys are farther
    for name, spans in ROWS.items():
        made = case(spans, NUM_KV_HEADS, DIM, DIM, in_order=name != "every-kind")
        query = torch.randn(NUM_HEADS, len(made.tokens), DIM)
        rules = AttentionRules(0.3, bias=bias)
        out = sdpa_attention(query, made.keys, made.values, made.row, rules)
        torch.testing.assert_close(out, made.expected(query, rules))


@pytest.mark.parametrize(
    "chunk", [1, 3, 8, 40]
)  # trees begin at positions 0, 2, 7 and 9: on both sides of an edge
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("backend", [masked_attention, sdpa_attention, FlashAttention("stand-in")])
def test_chunks_of_positions(backend, chunk, has_sinks, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    for name, spans in ROWS.items():
        made = case(spans, NUM_KV_HEADS, DIM, DIM, in_order=name != "every-kind")
        agrees(backend, made, chunk=chunk, has_sinks=has_sinks)
        agrees(backend, made, has_sinks=has_sinks)  # masks of layers without chunks are others


@pytest.mark.parametrize("backend", [masked_attention, sdpa_attention, FlashAttention("stand-in")])
def test_keys_and_values_of_different_sizes(backend):
    agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, 6), window=4)


def test_sdpa_whatever_the_layout_of_what_torch_returns(monkeypatch):
    """CUDA's memory-efficient kernel, which is what takes a mask there, has a query's heads side by
    side.
    """
    real = torch.nn.functional.scaled_dot_product_attention

    def heads_last(*arguments, **options):
        return real(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", heads_last)
    agrees(sdpa_attention, case(SPANS, NUM_KV_HEADS, DIM, DIM))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ROWS)
def test_whatever_a_kernel_says_of_no_keys(name):
    agrees(FlashAttention("stand-in"), case(ROWS[name], NUM_KV_HEADS, DIM, DIM), has_sinks=True)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("window", [None, 6])
def test_long_ranges_in_pieces(window, monkeypatch):
    monkeypatch.setattr(packing, "PIECE_KEYS", 4)
    made = case(
        [(0, 1, BRANCHING), (2, 1, CHAIN), (21, 3, BRANCHING), (9, 1, ROOT)], NUM_KV_HEADS, DIM, DIM
    )
    agrees(FlashAttention("stand-in"), made, window)
    plan = made.row.plan(packing.pack, torch.device("cpu"), window, NUM_HEADS, NUM_KV_HEADS)
    assert {len(block.pieces) for block in plan.blocks} == {6 if window is None else 2}
    assert any(block.is_empty is not None for block in plan.blocks)


def test_draft_levels_see_what_was_staged_before(monkeypatch):
    """A beam's level: two own tokens per sequence, four staged ones, as the drafter masks them."""
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    spans = []
    for index, length in enumerate((0, 5)):
        mask = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], dtype=torch.bool)
        positions = length + torch.tensor([0, 0, 1, 1, 2, 2])
        spans.append(
            Span(CachedSequence(12 * index, 12, length), 2 * index, 2 * index + 2, mask, positions)
        )
    row = PackedBatch(spans, [span.visible for span in spans])
    query, keys, values = (
        torch.randn(NUM_HEADS, 4, DIM),
        torch.randn(24, 2, DIM),
        torch.randn(24, 2, DIM),
    )
    for window in (None, 2, 4):
        arguments = query, keys, values, row, AttentionRules(0.3, window)
        torch.testing.assert_close(
            FlashAttention("stand-in")(*arguments), masked_attention(*arguments)
        )


def test_no_key_is_copied_and_query_heads_are_folded(monkeypatch):
    made = case(ROWS["long-chains-beside-trees"], NUM_KV_HEADS, DIM, DIM)
    seen = list[int]()

    class Watched(StandIn):
        def __call__(self, query, key, *arguments):
            seen.append(key.data_ptr())
            return super().__call__(query, key, *arguments)

    kernel = Watched(torch.device("cpu"))
    monkeypatch.setattr("hf_slospec.cuda.flash_attention.kernel_on", lambda *_: kernel)
    agrees(FlashAttention("stand-in"), made)
    groups = NUM_HEADS // NUM_KV_HEADS
    assert kernel.calls == [
        (True, 70, groups),
        (False, 8 * groups, 1),
    ]  # prompts by the causal kernel
    assert set(seen) == {made.keys.data_ptr()}


def attention_with_lse(query, keys, values, mask, rules):
    """Return attention of one head in fp32, and its log-sum-exp."""
    scores = torch.einsum("bqhd,bkhd->bqhk", query.float(), keys.float()) * rules.scaling
    scores = rules.capped(scores).masked_fill(~mask[:, :, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("bqhk,bkhd->bqhd", weights, values.float()), scores.logsumexp(-1)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_merging_in_fp32_what_was_computed_in_bf16(softcap):
    query, keys, values = (torch.randn(1, length, 1, 64).bfloat16() for length in (6, 50, 50))
    mask = torch.rand(1, 6, 50) < 0.7
    mask[0, 0], mask[0, :, 45] = (
        torch.arange(50) == 45,
        True,
    )  # the first query sees nothing of the other parts
    rules = AttentionRules(0.125, softcap=softcap)
    whole, _ = attention_with_lse(query, keys, values, mask, rules)
    cuts = [0, 11, 11, 30]  # one part is empty
    parts = [
        attention_with_lse(query, keys[:, a:b], values[:, a:b], mask[..., a:b], rules)
        for a, b in itertools.pairwise(cuts)
    ]
    outs, lses = (torch.stack(tensors, -1)[:, :, 0] for tensors in zip(*parts, strict=True))
    outs = outs.transpose(-1, -2)
    bias = torch.zeros(1, 6, 20).masked_fill(~mask[..., 30:], -torch.inf)
    rest = query[:, :, 0], keys[:, 30:, 0], values[:, 30:, 0], bias
    torch.testing.assert_close(merged_attention(*rest, outs, lses, rules), whole[:, :, 0])
    rounded = merged_attention(*rest, outs.bfloat16(), lses, rules)  # as kernels return them
    torch.testing.assert_close(rounded, whole[:, :, 0], rtol=0, atol=8e-3)


def test_routed_to_sdpa_with_a_debug_log(monkeypatch, caplog):
    monkeypatch.setattr(kernel_choice, "KERNELS", (flash_stand_in.WithoutSoftcap,))
    backend = FlashAttention("stand-in")
    with caplog.at_level(logging.DEBUG, "hf_slospec.cuda"):
        for _ in range(2):
            agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, DIM), softcap=2.0)
            agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, 6))
            agrees(backend, case(SPANS, NUM_KV_HEADS, 6, 6))
            agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, DIM), chunk=4)
    said = [
        record.getMessage() for record in caplog.records if "sdpa instead" in record.getMessage()
    ]
    words = ["softcap", "values of size 6", "heads of size 6", "chunked attention"]
    assert len(said) == len(words) and all(
        word in one for word, one in zip(words, said, strict=True)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        flash_stand_in.TopLeft,
        flash_stand_in.BaseTwo,
        flash_stand_in.Transposed,
        flash_stand_in.Broken,
    ],
)
def test_a_kernel_that_means_something_else_is_not_taken(wrong, monkeypatch, caplog):
    monkeypatch.setattr(kernel_choice, "KERNELS", (wrong, StandIn))
    with caplog.at_level(logging.DEBUG, "hf_slospec.cuda"):
        kernel = kernel_on(torch.device("cpu"), torch.float32, 64)
    assert kernel.name == "stand-in"
    assert (
        f"with heads of size 64: {wrong.name}" in caplog.text and "done by stand-in" in caplog.text
    )


def test_flash_cannot_be_had_on_cpu():
    assert PackedModel(tiny_model("llama")).backend is sdpa_attention
    assert packed_model(tiny_model("llama"), "4d_mask").backend is masked_attention
    with pytest.raises(
        UnsupportedOptionError,
        match=r'"flash" is not available: .*CUDA device.*use attention="auto"',
    ):
        SLOSpecGenerator(tiny_model("llama"), config=SLOSpecConfig(attention="flash"))


@pytest.mark.parametrize("family", EXACT)
def test_every_attention_call_of_other_families(family, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = sharpened(lambda: model_class(tiny_config(model_class.config_class)), 0)
    assert compare_layers(model, 1e-5) >= 4
