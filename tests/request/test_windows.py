"""Windows of ten tokens: the slowest one, and probabilities of small processes against all of their
outcomes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.events import Commit
from hf_slospec.request.metrics import (
    MIN_SHARE,
    WINDOW,
    kept_probability,
    planned_share,
    steps_needed,
    window_probability,
    worst_tpot_s,
)

PLAIN = np.array([0.0, 1.0])  # one token per step
MIXED = np.array([0.0, 0.2, 0.0, 0.5, 0.0, 0.3])  # 1, 3 or 5 tokens
TWO = np.array([0.0, 0.4, 0.0, 0.0, 0.6])  # 1 or 4 tokens


def worst_of(*arrivals):
    """Return the worst TPOT of commits, each given by its tokens so far and its seconds."""
    return worst_tpot_s([Commit(number, at_s, 1, 0) for number, at_s in arrivals])


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
    assert worst_of(*zip(counts, times, strict=True)) == expected


def test_worst_tpot_needs_more_than_a_window():
    assert worst_of((1, 0.0), (WINDOW, 5.0)) is None
    assert worst_of((1, 0.0), (WINDOW + 1, 5.0)) == 0.5
    assert worst_of((1, 0.0), (2, 5.0), (WINDOW + 1, 5.0), (2 * WINDOW + 1, 6.0)) == 0.5


def outcomes(committed, num_steps):
    """Yield the tokens of every sequence of steps, with its probability."""
    sizes = np.flatnonzero(committed)
    for sequence in itertools.product(sizes.tolist(), repeat=num_steps):
        yield sequence, float(np.prod(committed[list(sequence)]))


def exact_kept(committed, allowed_steps, num_tokens):
    """The probability that each window of a request takes at most so many steps of one second."""
    total = 0.0
    for sequence, probability in outcomes(committed, num_tokens - 1):
        counts = np.minimum(np.cumsum([1, *sequence]), num_tokens)
        worst = worst_of(*zip(counts.tolist(), range(num_tokens), strict=True))
        total += probability * (worst is None or worst * WINDOW <= allowed_steps + 1e-9)
    return total


def test_steps_of_a_window_have_their_exact_distribution():
    exact = np.zeros(WINDOW + 1)
    for sequence, probability in outcomes(TWO, WINDOW):
        exact[1 + int(np.searchsorted(np.cumsum(sequence), WINDOW))] += probability
    assert steps_needed(TWO) == pytest.approx(exact)
    assert steps_needed(PLAIN) == pytest.approx(np.eye(1, WINDOW + 1, WINDOW)[0])


@pytest.mark.parametrize("allowed", [2, 3, 4, 6])
def test_one_window_has_its_exact_probability(allowed):
    exact = exact_kept(TWO, allowed, WINDOW + 1)
    window = float(window_probability(steps_needed(TWO), np.array(allowed), 0.0))
    assert window == pytest.approx(exact)


@pytest.mark.parametrize("allowed", [3, 4, 5, 6])
def test_several_windows_are_kept_at_least_as_often(allowed):
    num_tokens = WINDOW + 4
    exact = exact_kept(TWO, allowed, num_tokens)
    mean = float(TWO @ np.arange(len(TWO)))
    share = WINDOW / (allowed * mean)
    # Each of the tokens after the first ten begins a window at most, which is more than the mean
    # number of steps.
    every = float(window_probability(steps_needed(TWO), np.array(allowed), 0.0)) ** (
        num_tokens - WINDOW
    )
    assert every <= exact + 1e-12
    assert kept_probability(share, TWO, 0.0, 0.0, WINDOW + mean) == pytest.approx(
        exact_kept(TWO, allowed, WINDOW + 1)
    )


def test_varying_steps_and_requests_are_kept_as_often_as_in_a_simulation():
    rng = np.random.default_rng(0)
    share = 0.55
    variation = 0.15
    spread = 0.2
    number = 20_000
    mean = float(MIXED @ np.arange(len(MIXED)))
    tokens = rng.choice(len(MIXED), size=(number, WINDOW), p=MIXED).cumsum(axis=1)
    pace = np.exp(spread * rng.standard_normal((number, 1)))
    seconds = (pace * (1.0 + variation * rng.standard_normal((number, WINDOW)))).cumsum(axis=1)
    ends = seconds[np.arange(number), (tokens >= WINDOW).argmax(axis=1)]
    simulated = float((ends <= WINDOW / (share * mean)).mean())
    assert kept_probability(share, MIXED, variation, spread, WINDOW + mean) == pytest.approx(
        simulated, abs=0.01
    )


@pytest.mark.parametrize("probability", [0.8, 0.9, 0.95, 0.99])
def test_the_share_is_the_largest_that_keeps_the_promise(probability):
    process = (MIXED, 0.1, 0.1, 200.0)
    share = planned_share(probability, *process)
    assert (
        kept_probability(share, *process) >= probability > kept_probability(share * 1.01, *process)
    )


def test_shares_by_variance():
    assert planned_share(0.99, PLAIN, 0.0, 0.0, 500.0) == 1.0  # nothing varies
    assert planned_share(0.99, MIXED, 0.0, 0.0, 5.0) == 1.0  # no window
    assert planned_share(0.999999, MIXED, 5.0, 3.0, 1e6) == MIN_SHARE
    shares = [planned_share(0.9, MIXED, 0.1, spread, 200.0) for spread in (0.0, 0.2, 0.4)]
    assert shares == sorted(shares, reverse=True)
    assert planned_share(0.9, MIXED, 0.1, 0.1, 50.0) > planned_share(0.9, MIXED, 0.1, 0.1, 500.0)
