"""What the length of a step costs first tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_slospec.engine.first_tokens import IN_TIME, LATE, PRICE, FirstTokens

STEPS_S = np.array([0.1, 0.5, 1.0, 2.0])


def own_s(num_tokens):
    return 0.01 * num_tokens


def test_steps_have_no_price_where_no_first_token_depends_on_them():
    first_tokens = FirstTokens()
    first_tokens.arrived(math.inf, 0)
    first_tokens.begin(math.inf, own_s)
    assert not first_tokens.is_expected and not first_tokens.is_due
    assert (first_tokens.price_s(STEPS_S) == 0.0).all()


def test_the_price_is_what_requests_that_arrive_too_early_in_the_step_would_have_written():
    first_tokens = FirstTokens()
    for _ in range(3):
        first_tokens.arrived(math.inf, 0)
    first_tokens.arrived(1.0, 45)  # must arrive in the last 0.5 s of a step
    first_tokens.arrived(2.0, 90)  # ... 1 s
    first_tokens.arrived(0.1, 90)  # is missed however short steps are
    first_tokens.begin(math.inf, own_s)
    slacks_s = IN_TIME * 1.0 - 0.45, IN_TIME * 2.0 - 0.9
    expected = [
        sum(max(step_s - slack_s, 0.0) for slack_s in slacks_s) * PRICE / 6 for step_s in STEPS_S
    ]
    assert first_tokens.price_s(STEPS_S) == pytest.approx(expected)
    first_tokens.begin(math.inf, None)  # they would wait anyway
    assert (first_tokens.price_s(STEPS_S) == 0.0).all()


def test_a_step_that_commits_first_tokens_should_end_in_time():
    first_tokens = FirstTokens()
    first_tokens.begin(0.5, own_s)
    assert first_tokens.is_due
    assert first_tokens.price_s(STEPS_S) == pytest.approx([0.0, 0.0, 0.5 * LATE, 1.5 * LATE])
    first_tokens.begin(math.inf, own_s)
    assert not first_tokens.is_due
