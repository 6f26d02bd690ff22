"""Fixtures shared by the tests of captured forwards."""

from __future__ import annotations

import pytest

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.models.attention import flash_kernel_choice as kernel_choice
from hf_slospec.models.packed import model as packed
from tests.support.cuda_tests import captures, kernel  # noqa: F401  fixtures
from tests.support.stand_ins.graphs import OpaqueStandIn, Tapes

COST = ForwardCost(LatencyCurve((1, 16), (0.001, 0.002)))  # measuring would capture forwards of many sizes


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    """Stands in for CUDA's graphs of all models that are made while the test runs."""
    made = Tapes()
    monkeypatch.setattr(kernel_choice, "KERNELS", (OpaqueStandIn,))
    monkeypatch.setattr(packed, "capturer_for", lambda device: made)
    monkeypatch.setattr("hf_slospec.models.checked_model.load_profile", lambda packed: COST)
    return made
