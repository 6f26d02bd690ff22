"""Models in half precision, with fused layers and without."""

from __future__ import annotations

import copy

import torch

from hf_slospec.cuda.fused_layers import FusedLayers
from hf_slospec.model.linear_overrides import OverrideOptions
from tests.support.packed import overridden
from tests.support.toys.tiny_models import tiny_model


def half(family):
    return copy.deepcopy(tiny_model(family)).to(torch.bfloat16)


def fused_layers(model, wanted=True):
    return overridden(model, FusedLayers.for_model(model, OverrideOptions(fused_layers=wanted)))


def assert_same_up_to_rounding(model, fused, length=6):
    ids = torch.arange(length)[None] + 3
    plain = model(ids).logits
    with fused.in_force():
        found = model(ids).logits
    assert model(ids).logits.equal(plain)
    assert (found - plain).norm() < 0.03 * plain.norm()
