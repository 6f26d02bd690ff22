"""Fixtures of tests that train in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import _muon


@pytest.fixture(autouse=True, scope="package")
def _muon_in_fp32() -> Iterator[None]:
    """Orthogonalise in fp32: torch does so in bf16, which takes ten times as long on CPUs without its instructions."""
    orthogonalised = _muon._zeropower_via_newtonschulz

    def in_fp32(*given: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", lambda own: own.to(torch.float32, copy=True))
            return orthogonalised(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "_zeropower_via_newtonschulz", in_fp32)
        yield


@pytest.fixture(autouse=True, scope="module")
def _own_accelerator() -> Iterator[None]:
    """Begin and end without accelerate's state of the process, with which other settings are refused."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
