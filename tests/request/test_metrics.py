"""TPOT, over a whole request and at its worst, and attainment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.request.metrics import WINDOW, is_attained, tpot_s, worst_tpot_s


def test_tpot_is_the_mean_gap_after_the_first_token():
    assert tpot_s(2.0, 5.0, 4) == 1.0
    assert tpot_s(2.0, 2.5, 2) == 0.5
    assert tpot_s(2.0, 2.0, 3) == 0.0  # one burst


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_tpot_is_undefined_below_two_tokens(num_tokens):
    assert tpot_s(2.0, 2.0, num_tokens) is None


@given(first=st.floats(0, 1e6), gaps=st.lists(st.floats(0, 100), min_size=1, max_size=50))
@settings(deadline=None)
def test_tpot_lies_between_the_smallest_and_the_largest_gap(first, gaps):
    measured = tpot_s(first, first + sum(gaps), len(gaps) + 1)
    assert measured is not None
    assert min(gaps) - 1e-6 <= measured <= max(gaps) + 1e-6


@pytest.mark.parametrize(
    ("measured_s", "tpot_slo_s", "expected"),
    [
        (0.04, 0.05, True),
        (0.05, 0.05, True),
        (0.06, 0.05, False),
        (None, 0.05, True),  # no second token, nothing to be late with
        (0.06, None, None),
        (None, None, None),
    ],
)
def test_is_attained(measured_s, tpot_slo_s, expected):
    assert is_attained(measured_s, tpot_slo_s) is expected


@given(steps=st.lists(st.tuples(st.integers(1, 14), st.floats(0, 5)), max_size=30))
@settings(deadline=None)
def test_worst_tpot_is_the_slowest_window_of_all(steps):
    counts = list(itertools.accumulate(count for count, _ in steps))
    times = list(itertools.accumulate(gap for _, gap in steps))
    arrivals = [
        time_s for (count, _), time_s in zip(steps, times, strict=True) for _ in range(count)
    ]
    windows = [
        (arrivals[end] - arrivals[end - WINDOW]) / WINDOW for end in range(WINDOW, len(arrivals))
    ]
    expected = pytest.approx(max(windows)) if windows else None
    assert worst_tpot_s(list(zip(counts, times, strict=True))) == expected


def test_worst_tpot_needs_more_than_a_window():
    assert worst_tpot_s([(1, 0.0), (WINDOW, 5.0)]) is None
    assert worst_tpot_s([(1, 0.0), (WINDOW + 1, 5.0)]) == 0.5
    assert worst_tpot_s([(1, 0.0), (2, 5.0), (WINDOW + 1, 5.0), (2 * WINDOW + 1, 6.0)]) == 0.5
