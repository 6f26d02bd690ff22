"""Drafters that read hidden states of the target: the output is stock's, whatever they propose."""

from __future__ import annotations

import pytest

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_drafter, load_tiny_pair
from tests.support.breadth import quick_or
from tests.support.served_pair import PROMPTS
from tests.support.toys.tiny_models import assert_same_as_stock

TRAINED = SLOSpecConfig(
    policy="adaserve",
    check_invariants=True,
    token_budget=40,
    max_depth=quick_or(2, 4),
    kv_tokens=20_000,
)


@pytest.fixture(scope="module")
def trained():
    target, _, tokenizer = load_tiny_pair()
    return target, load_tiny_drafter("mtp", target), tokenizer


def inputs_of(tokenizer, num_prompts=3):
    return dict(
        tokenizer(PROMPTS[:num_prompts], return_tensors="pt", padding=True, padding_side="left")
    )


def test_trained_layer_is_accepted(trained):
    target, method, tokenizer = trained
    ours = SLOSpecGenerator(target, drafter=method, config=TRAINED)
    out = assert_same_as_stock(
        target, ours.generate, inputs_of(tokenizer), do_sample=False, max_new_tokens=48
    )
    steps = sum(metrics.tokens - metrics.accepted for metrics in out.slo)
    assert sum(metrics.tokens for metrics in out.slo) / steps > 2.0
