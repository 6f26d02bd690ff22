"""Captured forwards that return hidden states, and those of heads that read them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.drafters.head import HeadMethod
from hf_slospec.model.packed_model import Outputs
from tests.heads.checkpoints import target_of
from tests.support.breadth import nightly_but, quick_or
from tests.support.graph_bench import Bench
from tests.support.toys.feature_heads import FOLDERS, random_head
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

LAYERS: list[tuple[int, ...]] = [(), (1,), (2, 0), (0, 2), (2, 0, 1)]
CONFIG = SLOSpecConfig(
    attention="flash",
    policy="fixed",
    max_depth=3,
    max_width=2,
    prepack=False,
    check_invariants=True,
)


def forward(bench, layers):
    parts = bench.parts()
    rows = torch.arange(0, sum(len(part.input_ids) for part in parts), 2)
    return bench.sequences.forward(parts, rows, layers)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_replays_return_the_hidden_states_that_were_asked_for(family, tapes):
    """Signatures differ by the layers and their order; results do not share memory with those of
    later replays.
    """
    ours = Bench(tiny_model(family))
    plain = Bench(tiny_model(family), cuda_graphs=False)
    held = list[tuple[Outputs, Outputs]]()
    for layers in itertools.chain.from_iterable([LAYERS] * quick_or(3, 4)):
        held.append((forward(ours, layers), forward(plain, layers)))
        for bench in (ours, plain):
            bench.grow(1)
    assert ours.graphs is not None and len(ours.graphs) >= len(LAYERS)
    assert tapes.num_replayed > len(LAYERS)
    for found, expected in held:
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert (found.features is None) == (expected.features is None)
        if found.features is not None:
            assert found.features.shape == expected.features.shape
            torch.testing.assert_close(found.features, expected.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", nightly_but(["eagle3", "dflash"], FOLDERS))
def test_heads_draft_by_captured_forwards(kind, tapes, tmp_path):
    target = target_of("llama")
    head = random_head(kind, tmp_path)
    trees = list[list[int]]()
    for captures in (True, False):
        config = CONFIG.model_copy(update=dict(cuda_graphs=captures))
        generator = SLOSpecGenerator(target, drafter=HeadMethod(head), config=config)
        drafted = list[int]()
        options: tuple[dict[str, Any], ...] = (
            dict(do_sample=False),
            dict(do_sample=True, temperature=0.8),
        )
        for own in options:
            out = assert_same_as_stock(
                target,
                generator.generate,
                ragged_prompts(3),
                **own,
                max_new_tokens=quick_or(10, 14),
            )
            drafted += [
                number for metrics in out.slo for number in (metrics.drafted, metrics.accepted)
            ]
        trees.append(drafted)
        if captures:
            draft = generator.decoder.speculator.draft
            assert draft is not None and draft.packed.path("cuda_graphs").is_on
            assert tapes.num_replayed > 2 * tapes.num_captured > 0
    assert trees[0] == trees[1]
