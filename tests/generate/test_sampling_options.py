"""Options that shape the distribution: stock and ours on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec.generate.processors import IGNORE_SEQUENCE
from tests.support.against_stock import SAMPLED, check
from tests.support.breadth import quick_or

WARPERS: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.4),
    dict(temperature=1.7, top_k=7),
    dict(top_p=0.8),
    dict(top_k=40, top_p=0.9, temperature=0.7),
    dict(min_p=0.05),
    dict(typical_p=0.7),
    dict(epsilon_cutoff=0.02),
    dict(eta_cutoff=0.02),
    dict(top_h=0.5),
    dict(renormalize_logits=True, top_k=20),
    dict(remove_invalid_values=True),
]


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
def test_sampling(warpers: dict[str, Any]) -> None:
    check(SAMPLED | warpers, batches=quick_or((3,), (1, 3)))


@pytest.mark.parametrize("warpers", [WARPERS[0], WARPERS[4]], ids=str)
def test_sampling_node_by_node_where_a_step_has_many_logits(
    monkeypatch: pytest.MonkeyPatch, warpers: dict[str, Any]
) -> None:
    monkeypatch.setattr("hf_slospec.model.sampling.MAX_BATCHED_LOGITS", 0)
    check(SAMPLED | warpers)


def test_processors_that_ignore_the_sequence_do_so() -> None:
    scores = torch.randn(5, 50)
    ids = torch.empty(5, 0, dtype=torch.int64)
    made = {
        "TopKLogitsWarper": dict(top_k=5), "TopPLogitsWarper": dict(top_p=0.7), "TopHLogitsWarper": dict(top_h=0.4),
        "MinPLogitsWarper": dict(min_p=0.1), "TypicalLogitsWarper": dict(mass=0.7), "EpsilonLogitsWarper": dict(
        epsilon=0.02), "EtaLogitsWarper": dict(epsilon=0.02), "TemperatureLogitsWarper": dict(temperature=0.5),
        "SuppressTokensLogitsProcessor": dict(suppress_tokens=[3, 4]),
    }  # fmt: skip
    for kind in IGNORE_SEQUENCE:
        processor = kind(**made.get(kind.__name__, {}))
        together = processor(ids, scores.clone())
        for row in range(5):
            alone = processor(torch.randint(0, 50, (1, 9)), scores[row : row + 1].clone())
            torch.testing.assert_close(together[row : row + 1], alone)


def test_several_sequences_per_prompt() -> None:
    check(SAMPLED, batches=(1, 2), num_return_sequences=3)
