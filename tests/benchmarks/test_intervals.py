"""Intervals over seeds and requests, and shares of distances."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.intervals import interval_of, share_closed, t_quantile, wilson
from hf_slospec.errors import InvalidInputError


@pytest.mark.parametrize(
    ("degrees", "exact"), [(1, 12.7062), (9, 2.2622), (10, 2.2281), (20, 2.0860), (1000, 1.9623)]
)
def test_quantiles_are_those_of_the_tables(degrees, exact):
    assert t_quantile(degrees) == pytest.approx(exact, rel=2e-3)


def test_interval_of_the_mean():
    found = interval_of([1.0, 2.0, 3.0])  # standard deviation 1
    assert found["mean"] == 2.0
    assert (
        found["high"] - 2.0 == pytest.approx(4.302653 / 3**0.5) == pytest.approx(2.0 - found["low"])
    )
    assert interval_of([4.0]) == {"mean": 4.0}


def test_wilson_intervals():
    assert wilson(9, 10) == pytest.approx({"mean": 0.9, "low": 0.5958, "high": 0.9821}, abs=1e-4)
    assert (
        wilson(10, 10)["high"] == pytest.approx(1.0)
        and wilson(0, 10)["low"] == 0.0 < wilson(0, 10)["high"]
    )
    for share in (0.5, 0.95):
        hits = np.random.default_rng(0).binomial(100, share, 2000)
        found = [wilson(int(hit), 100) for hit in hits]
        assert np.mean([own["low"] <= share <= own["high"] for own in found]) == pytest.approx(
            0.95, abs=0.02
        )
    for number in (0, 3):
        with pytest.raises(InvalidInputError, match=f"got 4 of {number}"):
            wilson(4, number)


def test_share_of_a_distance():
    assert share_closed(10.0, 4.0, 2.0) == share_closed(0.0, 3.0, 4.0) == 0.75
    assert share_closed(1.0, 0.5, 2.0) == -0.5
    assert share_closed(1.0, 1.0, 1.0) is None
