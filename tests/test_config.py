"""The settings."""

from __future__ import annotations

import pytest

import hf_slospec
from hf_slospec import (
    InvalidTypeError,
    SLOSpecConfig,
)
from tests.support.tiny_models import tiny_model


def test_config_is_frozen_and_strict() -> None:
    with pytest.raises(ValueError, match="max_depht"):
        SLOSpecConfig(max_depht=3)
    with pytest.raises(ValueError, match="frozen"):
        SLOSpecConfig().max_depth = 3
    with pytest.raises(InvalidTypeError, match="config"):
        hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), config={"max_depth": 3})
    assert all(field.description for field in SLOSpecConfig.model_fields.values())
