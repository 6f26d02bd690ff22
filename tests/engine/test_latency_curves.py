"""Latency curves: monotone through the measured points, linear beyond them, and corrected by
observed times.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve

POINTS = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 10.0), min_size=1, max_size=10)


def test_curve_interpolates_between_points_and_goes_on_as_a_line():
    curve = LatencyCurve((2, 4, 8), (1.0, 2.0, 6.0))
    assert [curve(n) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0]
    assert [curve(n) for n in (9, 10, 108)] == [7.0, 8.0, 106.0]


def test_curve_of_one_point_is_constant():
    assert LatencyCurve((4,), (2.0,))(np.array([1, 4, 100])).tolist() == [2.0, 2.0, 2.0]


def test_fit_sorts_points_and_irons_out_noise():
    curve = LatencyCurve.fit([8, 1, 4, 2], [3.0, 1.0, 1.5, 2.0])
    assert curve == LatencyCurve((1, 2, 4, 8), (1.0, 1.75, 1.75, 3.0))


@given(points=POINTS)
@settings(deadline=None)
def test_fit_is_the_least_squares_monotone_curve(points):
    num_tokens = sorted(points)
    seconds = [points[n] for n in num_tokens]
    # The max-min formula of isotonic regression.
    expected = [
        max(
            min(np.mean(seconds[begin:end]) for end in range(i + 1, len(points) + 1))
            for begin in range(i + 1)
        )
        for i in range(len(points))
    ]
    curve = LatencyCurve.fit(list(points), list(points.values()))
    assert curve.num_tokens == tuple(num_tokens)
    assert curve.seconds == pytest.approx(expected)
    assert curve(np.array(num_tokens)) == pytest.approx(expected)


@given(points=POINTS)
@settings(deadline=None)
def test_more_tokens_never_take_less_time(points):
    curve = LatencyCurve.fit(list(points), list(points.values()))
    num_tokens = np.arange(1, 700)
    seconds = curve(num_tokens)
    assert seconds.shape == num_tokens.shape
    assert (np.diff(seconds) >= -1e-9).all()
    assert seconds[:5] == pytest.approx([curve(int(n)) for n in num_tokens[:5]])


@given(points=POINTS.filter(lambda points: len(points) > 1), beyond=st.integers(0, 1000))
@settings(deadline=None)
def test_beyond_the_last_point_the_last_slope_holds(points, beyond):
    curve = LatencyCurve.fit(list(points), list(points.values()))
    (x0, x1) = curve.num_tokens[-2:]
    (y0, y1) = curve.seconds[-2:]
    assert curve(x1 + beyond) == pytest.approx(y1 + beyond * (y1 - y0) / (x1 - x0))


def test_requests_and_keys_add_to_the_curve():
    cost = ForwardCost(LatencyCurve((1, 3), (1.0, 2.0)), per_request_s=0.25, per_key_s=0.01)
    assert cost(3) == 2.0  # one request is in the curve
    assert cost(3, num_requests=3) == 2.5
    assert cost(3, num_requests=3, num_keys=100) == 3.5
    assert cost(np.array([1, 2]), 2, 10) == pytest.approx([1.35, 1.85])


def test_a_scaled_cost_is_monotone_again():
    cost = ForwardCost(LatencyCurve((1, 2, 4), (1.0, 2.0, 3.0)), per_request_s=0.5, per_key_s=0.25)
    assert cost.scaled([2.0, 2.0, 2.0], 2.0) == ForwardCost(
        LatencyCurve((1, 2, 4), (2.0, 4.0, 6.0)), 1.0, 0.5
    )
    assert cost.scaled([1.0, 3.0, 1.0], 1.0).curve.seconds == (1.0, 4.5, 4.5)
