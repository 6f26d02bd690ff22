"""Fixtures of tests that train in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _own_accelerator():
    """Begin and end without accelerate's state of the process, with which other settings are
    refused.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
