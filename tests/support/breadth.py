"""How many cases tests run: a few, or all of them in ``make nightly``."""

from __future__ import annotations

import os

import pytest

EXHAUSTIVE = "EXHAUSTIVE" in os.environ  # set by make nightly


def quick_or(quick, full):
    """Return a size: the quick one, which is enough for the mechanism, or the full one in
    ``make nightly``.
    """
    return full if EXHAUSTIVE else quick


def nightly_but(quick, values):
    """Return values of one parameter, marked as nightly but for the quick ones."""
    return nightly_rows_but([(value,) for value in quick], [(value,) for value in values])


def nightly_rows_but(quick, rows):
    """Return values of several parameters at once, marked as nightly but for the quick ones."""
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.nightly) for row in rows]
