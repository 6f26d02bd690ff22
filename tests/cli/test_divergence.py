"""The divergence report: compared tokens and the classification of near-ties."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from hf_slospec import (
    Divergence,
    InvalidInputError,
    SLOSpecGenerator,
    divergence_report,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.cli import divergence
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

OPTIONS = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)


def padded_len(inputs):
    return inputs["input_ids"].shape[1]


Replace = Callable[[Callable[[torch.Tensor], torch.Tensor | None]], None]


@pytest.fixture
def replace_output(monkeypatch):
    """Has new tokens [batch, new] replaced, or changed in place, before the report compares them."""
    decode = divergence.decode

    def replace(change):
        def wrong(call):
            output = decode(call)
            length = call.rows.input_ids.shape[1]
            prompt, new = output.sequences.tensor_split([length], 1)
            replaced = change(new)
            output.sequences = torch.cat((prompt, new if replaced is None else replaced), 1)
            return output

        monkeypatch.setattr(divergence, "decode", wrong)

    return replace


def plain_logits(model, inputs, row, new):
    """-> [vocab], of the token after the row's prompt and ``new``"""
    prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
    with torch.no_grad():
        return model(torch.tensor([prompt + new])).logits[0, -1]


def test_near_tie_needs_a_margin_within_rounding_or_noise():
    def at(ours, rounding, noise):
        return Divergence(0, 0, 1, 2, 8.0, ours, rounding, noise).is_near_tie

    assert at(8.0, 0.0, 0.0)
    assert at(7.9375, 0.0625, 0.0) and at(7.875, 0.0625, 0.125)
    assert not at(7.75, 0.0625, 0.125)
    assert not at(-math.inf, math.nan, 0.1) and not at(math.nan, math.nan, 0.1)


def test_nothing_diverges_in_fp32():
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03))
    inputs = ragged_prompts(4)
    report = divergence_report(generator, inputs, **OPTIONS)
    assert report.divergences == [] and report.all_near_ties
    assert (report.num_rows, report.num_tokens, report.dtype) == (4, 80, torch.float32)
    stock = type(model).generate(model, **inputs, **OPTIONS)[:, padded_len(inputs) :].tolist()
    assert report.stock_tokens == stock == report.our_tokens
    counted = "4 rows, 80 tokens compared in float32: 0 divergences, 0 of them at near-ties"
    assert str(report) == f"{counted}; guaranteed: none in fp32, near-ties in other dtypes"


def test_a_wrong_token_is_no_near_tie(replace_output):
    model = tiny_model("llama")
    inputs = ragged_prompts(3)

    def change(new):
        assert new.shape == (3, 20)
        new[1, 7] = (new[1, 7] + 1) % 100
        new[1, 9] = 3  # later differences of a row do not count
        new[2, 0] = (new[2, 0] + 1) % 100

    replace_output(change)
    report = divergence_report(SLOSpecGenerator(model), inputs, **OPTIONS)
    assert [(d.row, d.position) for d in report.divergences] == [(1, 7), (2, 0)]
    assert not report.all_near_ties and not any(d.is_near_tie for d in report.divergences)
    assert report.num_tokens == 20 + 8 + 1
    for d in report.divergences:
        new = report.stock_tokens[d.row]
        logits = plain_logits(model, inputs, d.row, new[: d.position])  # also of the padded rows
        assert (d.stock_token, d.our_token) == (new[d.position], (new[d.position] + 1) % 100)
        assert d.stock_token == int(logits.argmax())
        assert [d.stock_logit, d.our_logit] == pytest.approx(
            logits[[d.stock_token, d.our_token]].tolist(), abs=1e-5
        )
        assert d.margin == d.stock_logit - d.our_logit > 0
        assert 0 < d.noise < 1e-2 < d.margin
    lines = str(report).splitlines()
    assert len(lines) == 3 and "2 divergences, 0 of them" in lines[0]
    assert lines[-1].startswith("row 2, new token 0: ") and lines[-1].endswith("(not a near tie)")


def test_a_slightly_different_target_is_told_from_rounding(replace_output):
    """What a small error in our forward would look like: weights off by 4% of their spread."""
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    other = copy.deepcopy(target)
    for parameter in other.parameters():
        if parameter.ndim > 1:
            parameter.data.add_(0.04 * parameter.data.std() * torch.randn_like(parameter))
    inputs = tokenizer(
        [text[:100] for text in tiny_prompts()[: quick_or(3, 6)]], return_tensors="pt", padding=True
    )
    options = OPTIONS
    others = SLOSpecGenerator(other, draft).generate(**inputs, **options)
    replace_output(lambda _: others[:, padded_len(inputs) :])
    report = divergence_report(SLOSpecGenerator(target, draft), inputs, **options)
    assert report.divergences and not report.all_near_ties, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_exact_tie_is_a_near_tie(dtype, replace_output):
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    inputs = ragged_prompts(2)
    stock = type(model).generate(model, **inputs, **OPTIONS)[:, padded_len(inputs) :]
    twin = next(token for token in range(100, 2, -1) if token not in set(stock.flatten().tolist()))
    token = int(stock[1, 4])
    at = stock[1].tolist().index(token)
    assert token < twin  # argmax takes the first of equals: stock output stays what it was
    model.lm_head.weight.data[twin] = model.lm_head.weight.data[token]

    def change(new):
        new[1, at] = twin

    replace_output(change)
    report = divergence_report(SLOSpecGenerator(model), inputs, **OPTIONS)
    (found,) = (d for d in report.divergences if d.row == 1)
    assert (found.stock_token, found.our_token, found.position) == (token, twin, at)
    assert found.is_near_tie and found.rounding > 0
    assert (
        found.margin < 1e-6
    )  # not always 0: the kernel may add up two equal rows in different orders
    assert f"{found}".endswith("(near tie)")


def test_output_that_ends_too_early_or_too_late_differs(replace_output):
    model = tiny_model("llama")
    inputs = ragged_prompts(1)
    output = SLOSpecGenerator(model).generate(**inputs, **OPTIONS | {"max_new_tokens": 30})[
        :, padded_len(inputs) :
    ]
    for tokens in (5, 30):
        replace_output(lambda _, tokens=tokens: output[:, :tokens])
        (found,) = divergence_report(
            SLOSpecGenerator(model), inputs, **OPTIONS, pad_token_id=0
        ).divergences
        assert found.position == min(tokens, 20) and not found.is_near_tie


def test_bf16_pair_diverges_at_near_ties_only():
    target, draft, tokenizer = load_tiny_pair(torch.bfloat16)
    generator = SLOSpecGenerator(target, draft, tokenizer)
    num_rows = quick_or(4, 6)
    inputs = tokenizer(
        [text[:100] for text in tiny_prompts()[:num_rows]], return_tensors="pt", padding=True
    )
    report = divergence_report(generator, inputs, max_new_tokens=24, do_sample=False)
    assert report.num_rows == num_rows and report.num_tokens > 48 and report.dtype == torch.bfloat16
    assert report.all_near_ties, str(report)


def test_tokens_that_were_speculated_before_are_compared():
    model = tiny_model("llama")
    inputs = ragged_prompts(2)
    ours = SLOSpecGenerator(model)
    stock = divergence_report(ours, inputs, **OPTIONS).stock_tokens
    changed = [stock[0], [*stock[1][:7], (stock[1][7] + 1) % 100]]
    report = divergence_report(ours, inputs, our_tokens=changed, **OPTIONS)
    assert [(each.row, each.position, each.is_near_tie) for each in report.divergences] == [
        (1, 7, False)
    ]
    assert report.num_tokens == len(stock[0]) + 8
    assert not divergence_report(ours, inputs, our_tokens=stock, **OPTIONS).divergences
    with pytest.raises(InvalidInputError, match="our_tokens has 1 rows and the inputs have 2"):
        divergence_report(ours, inputs, our_tokens=stock[:1], **OPTIONS)
