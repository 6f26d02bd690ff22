"""Captured forwards of DFlash blocks on the CPU: tapes of operators stand in for CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from tests.heads.test_dflash import VARIANTS, config_of, random_head, texts_of
from tests.support.packed import packed_model


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_replayed(variant, tapes):
    packed = packed_model(random_head(config_of(variant)), "flash", prepack=False)
    with texts_of(packed, 2) as texts:
        for count in (3, 0, 7, 1, 12, 2):
            texts.cache([count + 1, count])
            torch.testing.assert_close(
                texts.blocks([6, 7]), texts.expected([6, 7]), rtol=1e-5, atol=1e-5
            )
    assert tapes.num_replayed > tapes.num_captured > 0
