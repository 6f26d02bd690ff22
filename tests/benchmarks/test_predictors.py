"""Tests of the recording and the replay of drafters' chains on real texts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.predictors import (
    AVERAGE,
    CONSTANTS,
    ORACLE,
    OURS,
    PLAIN,
    RANDOM,
    Chains,
    agreeing,
    latency_s,
    most_probable_path,
    recorded,
)
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.tiny_models import tiny_model


def test_agreeing():
    assert agreeing([3, 4, 5], [3, 4, 6, 5]) == 2
    assert agreeing([3, 4], [3]) == 1
    assert agreeing([], [3]) == agreeing([4], [3, 4]) == 0


def test_the_most_probable_path_of_a_tree():
    parents = np.array([-1, 0, 0, 1, 2, 2, 5])
    probs = np.array([1.0, 0.4, 0.5, 0.4, 0.1, 0.3, 0.3])
    tree = TokenTree(np.arange(10, 17), parents, np.array([0, 1, 1, 2, 2, 2, 3]), probs)
    assert most_probable_path(tree) == ([12, 15, 16], [0.5, 0.3, 0.3])
    assert most_probable_path(TokenTree.root_only(3)) == ([], [])


def test_chains_of_prompt_lookup():
    prompts = [np.random.default_rng(seed).integers(3, 101, 12).tolist() * 2 for seed in range(3)]
    model = tiny_model("llama")
    texts = recorded(model, "lookup", prompts, 12)
    assert [text.input_tokens for text in texts] == [24, 24, 24]
    for text in texts:
        assert len(text.accepted) == len(text.path_probs) <= 12 and text.path_probs[0] == []
        for accepted, probs in zip(text.accepted, text.path_probs, strict=True):
            assert accepted <= len(probs) <= 8 and probs == sorted(probs, reverse=True)
    assert any(probs for text in texts for probs in text.path_probs)


def repeated(probs, accepted, times):
    return Chains(
        input_tokens=5, path_probs=[probs] * (len(accepted) * times), accepted=accepted * times
    )


@pytest.mark.parametrize("rate", [1.0, 50.0])
def test_predictors_that_know_more_are_not_slower(rate):
    chains = [repeated([0.5**depth for depth in range(1, 9)], [0, 0, 3, 2, 1, 0, 0, 8], times=8)]
    latencies = {
        name: latency_s(chains, "llama-7b-a100", rate, name, 30, 0)
        for name in (PLAIN, RANDOM, AVERAGE, OURS, ORACLE, *CONSTANTS)
    }
    assert latencies[ORACLE] == min(latencies.values())
    assert latencies[OURS] < latencies[PLAIN]


def test_the_oracle_pays_nothing_for_a_drafter_that_is_never_right():
    chains = [repeated([0.9**depth for depth in range(1, 9)], [0], times=40)]
    plain, known = (
        latency_s(chains, "llama-7b-a100", 20.0, name, 20, 0) for name in (PLAIN, ORACLE)
    )
    assert known == pytest.approx(
        plain, rel=0.02
    )  # the oracle tries the drafts at no cost but the host's
    assert latency_s(chains, "llama-7b-a100", 20.0, RANDOM, 20, 0) > plain
