"""Gemma 3 270M in fp32, across its window of 512 tokens, and with a draft of another vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_drafter
from tests.support.breadth import quick_or

Stock = Callable[..., torch.Tensor]

GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
ALWAYS = SLOSpecConfig(policy="fixed", max_depth=quick_or(2, 4), max_width=2, check_invariants=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "drafter", "max_tokens", "batch"),
    [(GREEDY, "suffix", 505, 1), (SAMPLED, "lookup", 560, 2)],
    ids=["crossed while decoding", "crossed before by one row of two"],
)
def test_texts_on_both_sides_of_the_window(
    gemma3, questions, stock, options, drafter, max_tokens, batch
):
    texts = [questions["summarization"][3], questions["qa"][1]]
    inputs = gemma3.encoded(texts[:batch], max_tokens=max_tokens)
    assert inputs["input_ids"].shape[1] == max_tokens
    num_new = quick_or(10, 14)
    expected = stock(gemma3, inputs, max_new_tokens=num_new, **options)
    ours = SLOSpecGenerator(
        gemma3.model, tokenizer=gemma3.tokenizer, drafter=drafter, config=ALWAYS
    )
    torch.manual_seed(7)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=num_new, **options), expected)


@pytest.mark.parametrize("options", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.nightly)])
def test_smollm2_drafts_over_two_tokenizers(gemma3, smollm2, questions, stock, options):
    texts = [questions["qa"][2], questions["writing"][0]]
    inputs = gemma3.encoded(texts, max_tokens=quick_or(30, 60))
    drafter = load_drafter(
        smollm2.folder, gemma3.model, tokenizer=gemma3.tokenizer
    )  # reads the draft's tokenizer
    ours = SLOSpecGenerator(
        gemma3.model, tokenizer=gemma3.tokenizer, drafter=drafter, config=ALWAYS
    )
    expected = stock(gemma3, inputs, max_new_tokens=quick_or(5, 7), **options)
    torch.manual_seed(7)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=quick_or(5, 7), **options), expected)


@pytest.mark.nightly
def test_the_batcher(gemma3, questions, stock):
    prompts = [
        gemma3.encoded([questions[kind][4]], max_tokens=520) for kind in ("rag", "qa", "roleplay")
    ]
    with SLOSpecGenerator(gemma3.model, tokenizer=gemma3.tokenizer, drafter="suffix") as generator:
        handles = [
            generator.submit(inputs["input_ids"], max_new_tokens=14, do_sample=False)
            for inputs in prompts
        ]
        results = [handle.result(300.0) for handle in handles]
    for inputs, result in zip(prompts, results, strict=True):
        expected = stock(gemma3, inputs, max_new_tokens=14, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert result.token_ids == expected.tolist()
