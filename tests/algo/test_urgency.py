"""Progress of requests against their SLOs, and the weight of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec.algo.urgency import CUSHION, MAX_BEHIND, SLOProgress, urgency

TOKENS = st.floats(-100, 100)


def standing(*requests: tuple[float, float, float, float]) -> SLOProgress:
    """Of target, seconds elapsed, tokens emitted and tokens left."""
    return SLOProgress(*np.array(requests, dtype=np.float64).T)


def test_lateness_counts_tokens_beyond_the_one_that_comes_anyway() -> None:
    requests = standing((0.5, 1.0, 2, 10), (0.5, 3.0, 2, 10), (0.5, 1.0, 9, 10), (np.inf, 9, 0, 1))
    on_time, behind, ahead, unbound = requests.behind(0.5)
    assert on_time == 0.0  # at 1.5 s it owes 3 tokens: 2 are there, and 1 comes
    assert behind == 4.0
    assert ahead == -7.0
    assert unbound < 0.0


def test_lateness_is_tokens_per_target_time() -> None:
    late = standing((0.5, 1.0, 2, 10), (0.25, 1.0, 2, 10)).behind(0.0)
    assert late.tolist() == [-1.0, 1.0]


def test_needed_rate_meets_the_deadline_of_the_last_token() -> None:
    # 10 more tokens; 2 s left at 0.5 s a step: 4 steps of 2.5 tokens. No time left: no rate is enough.
    needed = standing((0.25, 1.0, 2, 10), (0.25, 3.0, 2, 10), (0.25, 9.0, 2, 10), (np.inf, 9.0, 2, 10)).needed_rate(0.5)
    assert needed.tolist() == [2.5, np.inf, np.inf, 0.0]


def test_cushion_is_what_the_rest_may_deviate_and_less_for_the_slow() -> None:
    own = standing((1.0, 0.0, 0, 50), (1.0, 0.0, 0, 2), (1.0, 0.0, 0, 0), (4.0, 0.0, 0, 50), (np.inf, 0.0, 0, 50))
    # 25 steps, one step and none of 2 tokens each, which deviate by 5, 1 and 0 times that of a step. At 2 s
    # a step those with 1 s per token need all of them, the one with 4 s a quarter, the one without target nothing.
    expected = [CUSHION * 0.8 * 5, CUSHION * 0.8, 0.0, CUSHION * 0.8 * 5 / 4, 0.0]
    assert own.cushion(own.needed_rate(2.0), 2.0, 0.8) == pytest.approx(expected)
    assert own.cushion(own.needed_rate(2.0), 2.0, 0.0).tolist() == [0.0] * 5


@given(late=st.lists(st.tuples(TOKENS, st.floats(0, 20)), min_size=2, max_size=6), strength=st.floats(0, 3))
def test_later_requests_never_count_less(late: list[tuple[float, float]], strength: float) -> None:
    tokens, cushion = np.array(sorted(late, key=sum)).T
    weights = urgency(tokens, cushion, np.zeros(len(late), dtype=np.bool_), strength)
    assert (np.diff(weights) >= 0.0).all()
    assert ((weights >= 1.0) & (weights <= 1.0 + strength * MAX_BEHIND)).all()
    assert (weights[tokens + cushion <= 0.0] == 1.0).all()


def test_weights() -> None:
    late, cushion = np.array([-5.0, 0.0, 2.0, 2.0, 99.0]), np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    is_unattainable = np.array([False, False, False, True, False])
    assert urgency(late, cushion, is_unattainable, 0.5).tolist() == [1.0, 1.5, 2.0, 1.0, 1.0 + 0.5 * MAX_BEHIND]
