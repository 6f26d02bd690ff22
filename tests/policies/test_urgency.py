"""Progress of requests against their SLOs, and the weight of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.policies.urgency import (
    CUSHION,
    END_NORM,
    MAX_BEHIND,
    SLOProgress,
    end_weights,
    urgency,
)


def standing(*requests):
    """Of target, seconds elapsed, tokens emitted and tokens left."""
    return SLOProgress(*np.array(requests, dtype=np.float64).T)


def test_lateness_counts_tokens_beyond_the_one_that_comes_anyway():
    requests = standing((0.5, 1.0, 2, 10), (0.5, 3.0, 2, 10), (0.5, 1.0, 9, 10), (np.inf, 9, 0, 1))
    on_time, behind, ahead, unbound = requests.behind(0.5)
    assert on_time == 0.0  # at 1.5 s it owes 3 tokens: 2 are there, and 1 comes
    assert behind == 4.0
    assert ahead == -7.0
    assert unbound < 0.0


def test_needed_rate_meets_the_deadline_of_the_last_token():
    # 10 more tokens; 2 s left at 0.5 s a step: 4 steps of 2.5 tokens. No time left: no rate is
    # enough.
    needed = standing(
        (0.25, 1.0, 2, 10), (0.25, 3.0, 2, 10), (0.25, 9.0, 2, 10), (np.inf, 9.0, 2, 10)
    ).needed_rate(0.5)
    assert needed.tolist() == [2.5, np.inf, np.inf, 0.0]


def test_cushion_is_what_the_rest_may_deviate_and_less_for_the_slow():
    own = standing(
        (1.0, 0.0, 0, 50),
        (1.0, 0.0, 0, 2),
        (1.0, 0.0, 0, 0),
        (4.0, 0.0, 0, 50),
        (np.inf, 0.0, 0, 50),
    )
    # 25 steps, one step and none of 2 tokens each, which deviate by 5, 1 and 0 times that of a
    # step. At 2 s a step those with 1 s per token need all of them, the one with 4 s a quarter, the
    # one without target nothing.
    expected = [CUSHION * 0.8 * 5, CUSHION * 0.8, 0.0, CUSHION * 0.8 * 5 / 4, 0.0]
    assert own.cushion(own.needed_rate(2.0), 2.0, 0.8) == pytest.approx(expected)
    assert own.cushion(own.needed_rate(2.0), 2.0, 0.0).tolist() == [0.0] * 5


def test_weights():
    late = np.array([-5.0, 0.0, 2.0, 2.0, 99.0])
    cushion = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    is_unattainable = np.array([False, False, False, True, False])
    assert urgency(late, cushion, is_unattainable, 0.5).tolist() == [
        1.0,
        1.5,
        2.0,
        1.0,
        1.0 + 0.5 * MAX_BEHIND,
    ]


ROWS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(1.0, 8.0)), min_size=2, max_size=8
)  # tokens left, rate


def weights_at_end(rows, fixed_s, row_s, num_steps=1000):
    """Return the weights of rows by tokens left and tokens per step, which so many steps have
    shown.
    """
    left, rates = np.array(rows, np.float64).T
    return end_weights(
        left, rates * num_steps, np.full(len(rows), float(num_steps)), fixed_s, row_s
    )


def test_the_row_that_ends_last_counts_most():
    slow, fast, short = weights_at_end([(100, 1.0), (100, 2.0), (10, 1.0)], 1.0, 0.0)
    assert slow > 5 * fast and fast > 10 * short
    # Where each row and step has its price, tokens of rows that end early save it, too.
    slow, fast, short = weights_at_end([(100, 1.0), (100, 2.0), (10, 1.0)], 0.0, 1.0)
    assert slow == pytest.approx(short, rel=0.02) and slow == pytest.approx(2 * fast, rel=0.02)


@given(rows=ROWS, fixed_s=st.floats(0.0, 10.0), row_s=st.floats(0.0, 10.0))
def test_weights_are_the_gradient_of_the_time_left(rows, fixed_s, row_s):
    left, rates = np.array(rows, np.float64).T

    def time_s(left):
        steps = left / rates
        return float(fixed_s * (steps**END_NORM).sum() ** (1 / END_NORM) + row_s * steps.sum())

    weights = weights_at_end(rows, fixed_s, row_s, num_steps=10**9)
    for row, weight in enumerate(weights.tolist()):
        change = np.zeros(len(rows))
        change[row] = 1e-3
        slope = (time_s(left + change) - time_s(left - change)) / 2e-3
        assert weight == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_rows_without_a_step_yet_are_weighted_by_what_is_left():
    weights = end_weights(np.array([20.0, 10.0]), np.zeros(2), np.zeros(2), 1.0, 0.0)
    assert weights[0] == pytest.approx(weights[1] * 2 ** (END_NORM - 1))
