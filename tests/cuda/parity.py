"""Models in half precision, with fused layers and without."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hf_slospec.cuda.fused_layers import FusedLayers
from hf_slospec.model.overrides import OverrideOptions, Overrides
from tests.support.packed import overridden
from tests.support.toys.tiny_models import tiny_model


def half(family: str) -> Any:
    return copy.deepcopy(tiny_model(family)).to(torch.bfloat16)


def fused_layers(model: Any, wanted: bool = True) -> Overrides:
    return overridden(model, FusedLayers.for_model(model, OverrideOptions(fused_layers=wanted)))


def assert_same_up_to_rounding(model: Any, fused: Overrides, length: int = 6) -> None:
    ids = torch.arange(length)[None] + 3
    plain = model(ids).logits
    with fused.in_force():
        found = model(ids).logits
    assert model(ids).logits.equal(plain)
    assert (found - plain).norm() < 0.03 * plain.norm()
