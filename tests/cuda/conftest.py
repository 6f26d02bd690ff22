"""Fixtures shared by the tests of captured forwards."""

from __future__ import annotations

import pytest

from hf_slospec.cuda import captured
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.generate.speculator import MEASURE_S
from tests.support.cuda_tests import captures, kernel  # noqa: F401  fixtures
from tests.support.stand_ins.cuda import stand_in_cuda
from tests.support.stand_ins.graphs import OpaqueStandIn, Tapes

COST = ForwardCost(
    LatencyCurve((1, 16), (0.001, 0.002))
)  # measuring would capture forwards of many sizes


@pytest.fixture
def device(monkeypatch):
    """Stands in for a CUDA device while the test runs."""
    for name in MEASURE_S:
        monkeypatch.setitem(MEASURE_S, name, 0.0)  # two sizes: times of a stand-in say nothing
    with stand_in_cuda() as device:
        yield device


@pytest.fixture
def tapes(monkeypatch):
    """Stands in for CUDA's graphs of all models that are made while the test runs."""
    made = Tapes()
    monkeypatch.setattr(kernel_choice, "KERNELS", (OpaqueStandIn,))
    monkeypatch.setattr(captured, "capturer_for", lambda device: made)
    monkeypatch.setattr("hf_slospec.model.checked_model.load_profile", lambda packed: COST)
    return made
