"""Packed models with some settings, computed eagerly unless compilation is asked for."""

from __future__ import annotations

from typing import Any

from hf_slospec import SLOSpecConfig
from hf_slospec.models.packed.model import PackedModel


def packed_model(model: Any, attention: str = "auto", **settings: Any) -> PackedModel:
    return PackedModel(model, SLOSpecConfig(**{"attention": attention, "compile": False} | settings))
