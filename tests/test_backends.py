"""One parity suite for all attention backends: every token of packed rows against itself alone."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError, load_tiny_pair
from hf_slospec.models.attention import FlashAttention, Row, Span, choice, masked_attention, packing, sdpa_attention
from hf_slospec.models.attention.merge import attention_with_lse, merge
from hf_slospec.models.kv_pool import CachedSequence
from hf_slospec.models.packed import PackedModel
from tests import flash_stand_in
from tests.attention_rows import TREES, Case, case
from tests.flash_stand_in import StandIn
from tests.tiny_models import FAMILIES, assert_same_as_stock, ragged_prompts, tiny_model

NUM_HEADS, NUM_KV_HEADS, DIM = 4, 2, 8
ROOT, BRANCHING, CHAIN = TREES
SPANS = [(prefix_len, chain_len, tree) for prefix_len in (0, 7) for chain_len in (1, 3) for tree in TREES]
ROWS = {
    "every-kind": SPANS,
    "long-chains-beside-trees": [(5, 70, ROOT), (0, 66, ROOT), *SPANS],  # as prompts are fed beside decoding
    "long-chains-only": [(5, 70, ROOT), (0, 66, ROOT)],
    "single-tokens": [(prefix_len, 1, ROOT) for prefix_len in (0, 1, 30)],
    "nothing-committed": [(0, 3, BRANCHING), (0, 1, CHAIN)],
}
STAND_INS = [StandIn, flash_stand_in.EmptyIsMinusInfinity, flash_stand_in.EmptyIsZero]


@pytest.fixture(params=STAND_INS)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KERNELS", (request.param,))


def agrees(backend: Any, made: Case, window: Any = None, softcap: Any = None, has_sinks: bool = False) -> None:
    query = torch.randn(NUM_HEADS, len(made.tokens), made.keys.shape[-1])
    sinks = torch.randn(NUM_HEADS) if has_sinks else None
    out = backend(query, made.keys, made.values, made.row, 0.3, window, softcap, sinks)
    assert out.shape == (len(made.tokens), NUM_HEADS, made.values.shape[-1])
    torch.testing.assert_close(out, made.expected(query, 0.3, window, softcap, sinks))


@pytest.mark.parametrize("window", [None, 1, 4, 9, 40])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("backend", [masked_attention, sdpa_attention, FlashAttention("stand-in")])
def test_every_kind_of_row(
    backend: Any, window: Any, softcap: Any, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "KERNELS", (StandIn,))
    for name, spans in ROWS.items():
        agrees(backend, case(spans, NUM_KV_HEADS, DIM, DIM, in_order=name != "every-kind"), window, softcap, has_sinks)


@pytest.mark.parametrize("backend", [masked_attention, sdpa_attention, FlashAttention("stand-in")])
def test_keys_and_values_of_different_sizes(backend: Any) -> None:
    agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, 6), window=4)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ROWS)
def test_whatever_a_kernel_says_of_no_keys(name: str) -> None:
    agrees(FlashAttention("stand-in"), case(ROWS[name], NUM_KV_HEADS, DIM, DIM), has_sinks=True)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("window", [None, 6])
def test_long_ranges_in_pieces(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_KEYS", 4)
    made = case([(0, 1, BRANCHING), (2, 1, CHAIN), (21, 3, BRANCHING), (9, 1, ROOT)], NUM_KV_HEADS, DIM, DIM)
    agrees(FlashAttention("stand-in"), made, window)
    plan = made.row.plan(packing.pack, torch.device("cpu"), window, NUM_HEADS, NUM_KV_HEADS)
    assert len(plan.split.pieces) == (6 if window is None else 2)
    assert plan.split.any_empty


def test_draft_levels_see_what_was_staged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam's level: two own tokens per sequence, four staged ones, as the drafter masks them."""
    monkeypatch.setattr(choice, "KERNELS", (StandIn,))
    spans = []
    for index, length in enumerate((0, 5)):
        mask = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], dtype=torch.bool)
        positions = length + torch.tensor([0, 0, 1, 1, 2, 2])
        spans.append(Span(CachedSequence(12 * index, 12, length), 2 * index, 2 * index + 2, mask, positions))
    row = Row(spans, [span.visible for span in spans])
    query, keys, values = torch.randn(NUM_HEADS, 4, DIM), torch.randn(24, 2, DIM), torch.randn(24, 2, DIM)
    for window in (None, 2, 4):
        arguments = query, keys, values, row, 0.3, window, None, None
        torch.testing.assert_close(FlashAttention("stand-in")(*arguments), masked_attention(*arguments))


def test_no_key_is_copied_and_query_heads_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(ROWS["long-chains-beside-trees"], NUM_KV_HEADS, DIM, DIM)
    seen = list[int]()

    class Watched(StandIn):
        def __call__(self, query: torch.Tensor, key: torch.Tensor, *arguments: Any) -> Any:
            seen.append(key.data_ptr())
            return super().__call__(query, key, *arguments)

    kernel = Watched(torch.device("cpu"))
    monkeypatch.setattr(choice, "kernel_on", lambda device: kernel)
    monkeypatch.setattr("hf_slospec.models.attention.flash.kernel_on", lambda device: kernel)
    agrees(FlashAttention("stand-in"), made)
    groups = NUM_HEADS // NUM_KV_HEADS
    assert kernel.calls == [(True, 70, groups), (False, 8 * groups, 1)]  # prompts by the causal kernel
    assert set(seen) == {made.keys.data_ptr()}


def test_merging_in_fp32_what_was_computed_in_bf16() -> None:
    made = case([(50, 1, BRANCHING)], NUM_KV_HEADS, 64, 64, torch.bfloat16)
    query = torch.randn(1, 6, NUM_HEADS, 64).bfloat16()
    keys, values, mask = made.keys[None], made.values[None], torch.rand(1, 6, len(made.keys)) < 0.7
    whole, whole_lse = attention_with_lse(query, keys, values, mask, 0.125, None)
    cuts = [0, 11, 11, 30, len(made.keys)]  # one part is empty
    parts = [
        attention_with_lse(query, keys[:, a:b], values[:, a:b], mask[..., a:b], 0.125, None)
        for a, b in itertools.pairwise(cuts)
    ]
    lses = torch.stack([lse for _, lse in parts])
    out, lse = merge(torch.stack([out for out, _ in parts]), lses)
    torch.testing.assert_close((out, lse), (whole, whole_lse))
    rounded, _ = merge(torch.stack([out.bfloat16() for out, _ in parts]), lses)  # as kernels return them
    torch.testing.assert_close(rounded, whole, rtol=0, atol=4e-3)
    nothing, lse = merge(torch.full((2, 1, 1, 4), torch.nan), torch.full((2, 1, 1), -torch.inf))
    assert torch.isneginf(lse).all() and not nothing.isnan().any()


def test_routed_to_sdpa_with_a_debug_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choice, "KERNELS", (flash_stand_in.WithoutSoftcap,))
    backend = FlashAttention("stand-in")
    with caplog.at_level(logging.DEBUG, "hf_slospec.models.attention"):
        for _ in range(2):
            agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, DIM), softcap=2.0)
            agrees(backend, case(SPANS, NUM_KV_HEADS, DIM, 6))
            agrees(backend, case(SPANS, NUM_KV_HEADS, 6, 6))
    said = [record.getMessage() for record in caplog.records if "sdpa instead" in record.getMessage()]
    assert len(said) == 3 and "softcap" in said[0] and "values of size 6" in said[1] and "heads of size 6" in said[2]


class TopLeft(StandIn):
    """Aligns its causal mask to the first key, as old kernels did."""

    name = "top-left"

    def __call__(self, query: Any, key: Any, value: Any, entries: Any, *rest: Any) -> Any:
        out, lse = super().__call__(query, key, value, entries, *rest)
        return (out.roll(1, 0), lse) if rest[1] else (out, lse)


class BaseTwo(StandIn):
    """FlashInfer's log-sum-exp."""

    name = "base two"

    def __call__(self, *arguments: Any) -> Any:
        out, lse = super().__call__(*arguments)
        return out, lse / 0.6931


class Transposed(StandIn):
    name = "transposed"

    def __call__(self, *arguments: Any) -> Any:
        out, lse = super().__call__(*arguments)
        return out, lse.T


@pytest.mark.parametrize("wrong", [TopLeft, BaseTwo, Transposed])
def test_a_kernel_that_means_something_else_is_not_taken(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "KERNELS", (wrong, StandIn))
    with caplog.at_level(logging.DEBUG, "hf_slospec.models.attention"):
        kernel = choice.kernel_on(torch.device("cpu"))
    assert kernel.name == "stand-in"
    assert f"no flash attention on cpu: {wrong.name}" in caplog.text and "done by stand-in" in caplog.text


def test_flash_cannot_be_had_on_cpu() -> None:
    assert PackedModel(tiny_model("llama")).backend is sdpa_attention
    assert PackedModel(tiny_model("llama"), "4d_mask").backend is masked_attention
    with pytest.raises(UnsupportedOptionError, match=r'"flash" cannot be had: .*CUDA device.*use attention="auto"'):
        SLOSpecGenerator(tiny_model("llama"), config=SLOSpecConfig(attention="flash"))


def test_flash_is_refused_where_no_layer_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfOnly(StandIn):
        dtypes = (torch.bfloat16,)

    monkeypatch.setattr(choice, "KERNELS", (HalfOnly,))
    with pytest.raises(UnsupportedOptionError, match=r"does not compute in torch.float32"):
        SLOSpecGenerator(tiny_model("llama"), config=SLOSpecConfig(attention="flash"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whole_models_of_many_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, prompts longer than a dense block, windows, softcap and sinks, token for token."""
    monkeypatch.setattr(choice, "KERNELS", (StandIn,))
    model, draft = tiny_model(family), tiny_model(family, noise=0.03)
    config = SLOSpecConfig(attention="flash", policy="fixed", max_depth=3, max_width=2, check_invariants=True)
    generator = SLOSpecGenerator(model, draft, config=config)
    inputs = ragged_prompts(3)
    inputs = (
        {name: torch.cat([rows] * 3 + [rows.clamp(min=1)], 1) for name, rows in inputs.items()} if False else inputs
    )
    assert_same_as_stock(model, generator.generate, inputs, do_sample=False, max_new_tokens=10)


def test_the_tiny_pair_by_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KERNELS", (StandIn,))
    pair = load_tiny_pair()
    print(type(pair))
