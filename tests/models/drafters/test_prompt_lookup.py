"""Drafting from the request's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.drafters.prompt_lookup import TRUST, PromptLookupDrafter, continuations
from tests.support.tiny_models import assert_same_as_stock, tiny_model


def draft(tokens: list[int], depth: int, width: int) -> list[tuple[list[int], float]]:
    """The candidate tree as (path of tokens, path probability), in order of nodes."""
    [tree] = PromptLookupDrafter().draft([Request(0, tokens, 10)], Plan(depth, width))
    tree.check()
    paths: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
    return [(path, float(prob)) for path, prob in zip(paths[1:], tree.path_probs[1:], strict=True)]


def test_longest_ngram_wins_and_latest_match_comes_first() -> None:
    assert continuations(np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 2) == [[9, 2]]
    assert continuations(np.array([5, 3, 9, 3, 8, 4, 3]), 2) == [[8, 4], [9, 3]]
    assert continuations(np.array([5, 5, 5]), 4) == [[5]]
    assert continuations(np.array([1, 2, 3]), 2) == []
    assert continuations(np.array([1]), 2) == []


def test_several_matches_become_branches() -> None:
    tokens = [7, 3, 9, 4, 7, 3, 8, 4, 7, 3, 9, 5, 7, 3]
    assert draft(tokens, 2, 4) == [
        ([9], pytest.approx(TRUST * 2 / 3)),
        ([8], pytest.approx(TRUST / 3)),
        ([9, 5], pytest.approx(TRUST**2 / 3)),
        ([9, 4], pytest.approx(TRUST**2 / 3)),
        ([8, 4], pytest.approx(TRUST**2 / 3)),
    ]
    assert [path for path, _ in draft(tokens, 2, 1)] == [[9], [9, 5]]


def test_nothing_found_is_a_root_alone() -> None:
    assert draft([1, 2, 3], 4, 4) == []


def test_same_tokens_as_stock_and_speculates() -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, config=SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40))
    prompts = torch.randint(3, 101, (3, 8)).repeat(1, 3)
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    for options in (dict(do_sample=False), dict(do_sample=True, temperature=0.7)):
        out = assert_same_as_stock(model, generator.generate, inputs, **options, max_new_tokens=40)
        assert sum(metrics.drafted for metrics in out.slo) > 0


def test_enable_without_assistant() -> None:
    model = hf_slospec.enable(tiny_model("qwen2"))
    try:
        inputs = {"input_ids": torch.randint(3, 101, (2, 9))}
        assert_same_as_stock(
            model, lambda **k: model.generate(**k, slo_tpot=0.05), inputs, do_sample=False, max_new_tokens=30
        )
    finally:
        hf_slospec.disable(model)
