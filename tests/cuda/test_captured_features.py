"""Captured forwards that return hidden states, and those of heads that read them."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_slospec.model.packed_model import Outputs
from tests.heads.test_dflash import VARIANTS, config_of, texts_of
from tests.heads.test_dflash import random_head as random_block_head
from tests.support.breadth import quick_or
from tests.support.graph_bench import Bench
from tests.support.packed import packed_model
from tests.support.toys.tiny_models import tiny_model

LAYERS: list[tuple[int, ...]] = [(), (1,), (2, 0), (0, 2), (2, 0, 1)]


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_dflash_blocks_are_replayed(variant, tapes):
    packed = packed_model(random_block_head(config_of(variant)), "flash", prepack=False)
    with texts_of(packed, 2) as texts:
        for count in (3, 0, 7, 1, 12, 2):
            texts.cache([count + 1, count])
            torch.testing.assert_close(
                texts.blocks([6, 7]), texts.expected([6, 7]), rtol=1e-5, atol=1e-5
            )
    assert tapes.num_replayed > tapes.num_captured > 0
