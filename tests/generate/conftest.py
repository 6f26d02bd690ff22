"""Fixtures shared by the tests of ``generate``."""

from __future__ import annotations

import pytest

import hf_slospec
from tests.support.toys.tiny_models import tiny_model


@pytest.fixture
def model():
    enabled = hf_slospec.enable(tiny_model("llama"), tiny_model("llama", noise=0.03))
    yield enabled
    hf_slospec.disable(enabled)
