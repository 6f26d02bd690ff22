"""Latency curves: through the measured points, monotone, a line beyond them; corrected by what is measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.algo.latency import Correction, ForwardCost, LatencyCurve, StepCosts

POINTS = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 10.0), min_size=1, max_size=10)


def of_tokens(num_tokens: tuple[int, ...], seconds: tuple[float, ...]) -> ForwardCost:
    return ForwardCost(LatencyCurve(num_tokens, seconds))


def test_curve_interpolates_between_points_and_goes_on_as_a_line() -> None:
    curve = LatencyCurve((2, 4, 8), (1.0, 2.0, 6.0))
    assert [float(curve(n)) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0]
    assert [float(curve(n)) for n in (9, 10, 108)] == [7.0, 8.0, 106.0]


def test_curve_of_one_point_is_constant() -> None:
    assert LatencyCurve((4,), (2.0,))(np.array([1, 4, 100])).tolist() == [2.0, 2.0, 2.0]


def test_fit_sorts_points_and_irons_out_noise() -> None:
    curve = LatencyCurve.fit([8, 1, 4, 2], [3.0, 1.0, 1.5, 2.0])
    assert curve == LatencyCurve((1, 2, 4, 8), (1.0, 1.75, 1.75, 3.0))


@given(points=POINTS)
@settings(deadline=None)
def test_fit_is_the_least_squares_monotone_curve(points: dict[int, float]) -> None:
    num_tokens = sorted(points)
    seconds = [points[n] for n in num_tokens]
    # The max-min formula of isotonic regression.
    expected = [
        max(min(np.mean(seconds[begin:end]) for end in range(i + 1, len(points) + 1)) for begin in range(i + 1))
        for i in range(len(points))
    ]
    curve = LatencyCurve.fit(list(points), list(points.values()))
    assert curve.num_tokens == tuple(num_tokens)
    assert curve.seconds == pytest.approx(expected)
    assert curve(np.array(num_tokens)) == pytest.approx(expected)


@given(points=POINTS)
@settings(deadline=None)
def test_more_tokens_never_take_less_time(points: dict[int, float]) -> None:
    curve = LatencyCurve.fit(list(points), list(points.values()))
    num_tokens = np.arange(1, 700)
    seconds = curve(num_tokens)
    assert seconds.shape == num_tokens.shape
    assert (np.diff(seconds) >= -1e-9).all()
    assert seconds[:5] == pytest.approx([float(curve(int(n))) for n in num_tokens[:5]])


@given(points=POINTS.filter(lambda points: len(points) > 1), beyond=st.integers(0, 1000))
@settings(deadline=None)
def test_beyond_the_last_point_the_last_slope_holds(points: dict[int, float], beyond: int) -> None:
    curve = LatencyCurve.fit(list(points), list(points.values()))
    (x0, x1), (y0, y1) = curve.num_tokens[-2:], curve.seconds[-2:]
    assert float(curve(x1 + beyond)) == pytest.approx(y1 + beyond * (y1 - y0) / (x1 - x0))


def test_requests_and_keys_add_to_the_curve() -> None:
    cost = ForwardCost(LatencyCurve((1, 3), (1.0, 2.0)), per_request_s=0.25, per_key_s=0.01)
    assert float(cost(3)) == 2.0  # one request is in the curve
    assert float(cost(3, num_requests=3)) == 2.5
    assert float(cost(3, num_requests=3, num_keys=100)) == 3.5
    assert cost(np.array([1, 2]), 2, 10) == pytest.approx([1.35, 1.85])


def observed(*parts: tuple[int, float, int]) -> Correction:
    """After forwards of this many tokens that took this much longer than predicted, so many times."""
    correction = Correction()
    for num_tokens, factor, count in parts:
        for _ in range(count):
            correction.observe(num_tokens, 2.0, 2.0 * factor)
    return correction


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_correction_learns_a_constant_factor_at_all_sizes(factor: float) -> None:
    correction = observed((6, factor, 24))
    assert correction(np.array([1, 6, 7, 500, 10**6])) == pytest.approx([factor] * 5, rel=0.02)


def test_correction_without_observations_changes_nothing() -> None:
    assert Correction()(np.array([1, 64])).tolist() == [1.0, 1.0]
    nothing = Correction()
    nothing.observe(4, 0.0, 1.0)  # drafting without a model is predicted to be free
    nothing.observe(4, 1.0, 0.0)
    assert float(nothing(4)) == 1.0


def test_correction_follows_a_change() -> None:
    factors = [float(observed((8, 1.0, 200), (8, 2.0, count))(8)) for count in (0, 12, 60, 120)]
    assert factors == sorted(factors)
    assert factors[0] == 1.0
    assert factors[1] > 1.15
    assert factors[-1] == pytest.approx(2.0, rel=0.05)


def test_one_pause_moves_the_correction_little() -> None:
    assert float(observed((8, 1.0, 100), (8, 1000.0, 1))(8)) < 1.05


def test_sizes_keep_factors_of_their_own() -> None:
    correction = observed(*[(1, 1.0, 1), (100, 2.0, 1)] * 60)
    assert float(correction(1)) == pytest.approx(1.0, abs=0.15)
    assert float(correction(127)) == pytest.approx(2.0, abs=0.25)
    assert 1.2 < float(correction(2000)) < 1.7  # never met: between them


def test_correction_remembers_a_bounded_amount() -> None:
    correction = observed(*[(2**power, 1.5, 100) for power in range(20)])
    assert correction._counts.shape == correction._logs.shape == (16,)
    assert correction._counts.sum() <= Correction.MEMORY


def test_draft_levels_cost_the_roots_once_then_a_beam_each() -> None:
    costs = StepCosts(verify=of_tokens((1,), (9.0,)), draft_level=of_tokens((1, 101), (1.0, 2.0)))
    assert costs.draft_s(1, 0, 4) == 0.0
    assert costs.draft_s(1, 1, 4) == pytest.approx(1.0)
    assert costs.draft_s(1, 3, 1) == pytest.approx(3.0)
    assert costs.draft_s(11, 1, 4) == pytest.approx(1.1)
    assert costs.draft_s(11, 3, 4) == pytest.approx(1.1 + 2 * 1.43)
    assert costs.draft_s(11, np.array([0, 1, 3]), 4) == pytest.approx([0.0, 1.1, 1.1 + 2 * 1.43])


SIZES = dict(num_requests=st.integers(1, 64), depth=st.integers(0, 8), width=st.integers(1, 8))


@given(points=POINTS, factor=st.floats(0.5, 2.0), **SIZES)
@settings(deadline=None)
def test_draft_costs_add_up_level_by_level(
    points: dict[int, float], factor: float, num_requests: int, depth: int, width: int
) -> None:
    cost = ForwardCost(LatencyCurve.fit(list(points), list(points.values())), 0.01, 0.001)
    costs = StepCosts(verify=cost, draft_level=cost)
    costs.observe_draft(factor * float(costs.draft_s(num_requests, 2, width, 50)), num_requests, 2, width, 50)
    levels = [cost(num_requests, num_requests, 50), *[cost(num_requests * width, num_requests, 50)] * (depth - 1)]
    expected = factor * float(sum(levels[:depth]))
    assert float(costs.draft_s(num_requests, depth, width, 50)) == pytest.approx(expected)
    assert costs.draft_s(num_requests, np.array([depth, 0]), width, 50) == pytest.approx([expected, 0.0])
    deeper = float(costs.draft_s(num_requests, depth + 1, width, 50))
    if depth:
        assert costs.level_s(num_requests, width, 50) == pytest.approx(deeper - expected)


@given(points=POINTS, **SIZES)
@settings(deadline=None)
def test_larger_plans_never_draft_faster(points: dict[int, float], num_requests: int, depth: int, width: int) -> None:
    cost = ForwardCost(LatencyCurve.fit(list(points), list(points.values())), 0.01, 0.001)
    costs = StepCosts(verify=cost, draft_level=cost)
    seconds = costs.draft_s(num_requests, depth, width)
    assert costs.draft_s(num_requests + 1, depth, width) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth + 1, width) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth, width + 1) >= seconds - 1e-9
    assert costs.draft_s(num_requests, depth, width, 10) >= seconds - 1e-9


def test_verifying_and_drafting_are_corrected_apart() -> None:
    costs = StepCosts(verify=of_tokens((1, 2), (1.0, 2.0)), draft_level=of_tokens((1,), (0.5,)))
    for _ in range(20):
        costs.observe_verify(3.0 * float(costs.verify(8, 2, 10)), 8, 2, 10)
        costs.observe_draft(0.5 * 3 * 0.5, 2, 3, 4, 10)
    assert float(costs.verify_s(8, 2, 10)) == pytest.approx(24.0)
    assert float(costs.draft_s(2, 3, 4, 10)) == pytest.approx(0.75)
