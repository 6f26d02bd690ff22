"""How many cases tests run: a few, or all of them in ``make nightly``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXHAUSTIVE = "EXHAUSTIVE" in os.environ  # set by make nightly


def nightly_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test, marked as nightly but for the quick ones."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.nightly) for value in values]
