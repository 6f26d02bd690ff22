"""Models in half precision, with fused layers and without."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hf_slospec.cuda.fused_layers import FusedLayers
from tests.support.toys.tiny_models import tiny_model


def half(family: str) -> Any:
    return copy.deepcopy(tiny_model(family)).to(torch.bfloat16)


def assert_same_up_to_rounding(model: Any, fused: FusedLayers, length: int = 6) -> None:
    ids = torch.arange(length)[None] + 3
    plain = model(ids).logits
    with fused.in_use():
        found = model(ids).logits
    assert model(ids).logits.equal(plain)
    assert (found - plain).norm() < 0.03 * plain.norm()
