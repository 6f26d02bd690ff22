"""The script that runs transformers' own tests: what it counts as new, and the page it writes."""

from __future__ import annotations

import torch

from scripts.transformers_tests import NOISE, Report, merged, new_failures, noisy_copy, page, short
from tests.support.toys.tiny_models import tiny_model

STOCK = Report(
    {"a": "passed", "b": "failed", "c": "skipped"},
    {"b": "no network"},
    {"a": "causal LM", "b": "causal LM"},
)
LOOKUP = Report(
    {"a": "failed", "b": "failed", "c": "passed"}, {"a": "other tokens", "b": "no network"},
    {"a": "causal LM", "b": "causal LM"}, {"LlamaForCausalLM": 3}, {"not with beam search": 2},
)  # fmt: skip


def test_only_failures_that_stock_does_not_have_are_new():
    assert new_failures(STOCK, LOOKUP) == {"a": "other tokens"}


def test_the_page_counts_and_names_them():
    text = page(
        {"stock": STOCK, "lookup": merged([LOOKUP, Report(speculated={"LlamaForCausalLM": 1})])},
        "5.0",
        ["a"],
    )
    assert (
        "| causal LM | stock | 1 | 1 | 0 | - |" in text
        and "| causal LM | lookup | 0 | 2 | 0 | 1 |" in text
    )
    assert (
        "| speculated | 4, of 1 classes |" in text
        and "| fell back: not with beam search | 2 |" in text
    )
    assert "- `a`: other tokens" in text and "the classes of a that" in text


def test_reasons_of_one_kind_are_one_line():
    first, second = (
        short(f"{name}ForCausalLM: row {row} is bad; do this")
        for name, row in (("Llama", 1), ("Opt", 23))
    )
    assert first == second == "the class: row N is bad"


def test_copies_draft_by_other_weights_and_leave_the_generator_alone():
    model = tiny_model("llama")
    state = torch.get_rng_state()
    copies = [noisy_copy(model) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    weight, *own = (each.lm_head.weight.detach() for each in (model, *copies))
    assert torch.equal(*own) and 0 < float((own[0] - weight).std()) < 2 * NOISE * float(
        weight.std()
    )
