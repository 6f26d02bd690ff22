"""Chain lengths and prefill rates of SLOs-Serve against enumerated schedules."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.scheduler.admission import best_lengths, prefill_rate
from tests.support.breadth import quick_or
from tests.support.toys.trees import affine, staircase

TARGETS = (0.25, 0.375, 0.5, 0.75, 1.5, 4.0, math.inf)


@given(
    curve=st.sampled_from([affine, staircase]),
    tiers=st.lists(
        st.tuples(
            st.sampled_from(TARGETS), st.integers(0, 5), st.sampled_from([0.0, 0.0, -0.125, -1.0])
        ),
        min_size=1,
        max_size=3,
    ),
    acceptance=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    max_len=st.integers(1, 4),
    draft_level_s=st.sampled_from([0.0, 0.0625, 0.125]),
    request_s=st.sampled_from([0.0, 0.0, 0.03125, 0.25]),
)
@settings(deadline=None, max_examples=quick_or(50, 150))
def test_lengths_are_the_best_of_all(curve, tiers, acceptance, max_len, draft_level_s, request_s):
    tpot_slos_s, counts, slacks_s = zip(*tiers, strict=True)
    seconds = curve(np.arange(1, 41))

    def rate(lengths):
        """Of prompt tokens, with steps as long as these chains allow; -inf if some tier cannot keep
        its target.
        """
        limit = min(
            target * sum(acceptance**k for k in range(length)) + slack
            for target, count, slack, length in zip(
                tpot_slos_s, counts, slacks_s, lengths, strict=True
            )
            if count
        )
        rows = list(zip(tpot_slos_s, counts, lengths, strict=True))
        load = sum(count * length for _, count, length in rows)
        due = sum(
            count / target for target, count, length in rows if length == 1
        )  # Each takes part when it is due.
        every = sum(
            count * length for target, count, length in rows if length > 1 or target == math.inf
        )
        longest = max(length for count, length in zip(counts, lengths, strict=True) if count)
        num_always = sum(
            count for target, count, length in rows if length > 1 or target == math.inf
        )
        left = 1.0 - request_s * due  # what requests that take part when they are due leave
        if left <= 0.0:
            return -math.inf
        steps = (seconds + (longest - 1) * draft_level_s + request_s * num_always) / left
        fitting = [n for n in range(max(load, 1), 41) if steps[n - 1] <= limit]
        return max(((n - every) / steps[n - 1] - due for n in fitting), default=-math.inf)

    found = best_lengths(
        curve, tpot_slos_s, counts, acceptance, max_len, 40, draft_level_s, slacks_s, request_s
    )
    if not any(counts):
        assert found is not None and found.lengths.tolist() == [0] * len(counts)
        return
    choices = [range(1, max_len + 1) if count else [0] for count in counts]
    best = max(map(rate, itertools.product(*choices)))
    if found is None:
        assert best == -math.inf
        return
    assert found.rate == pytest.approx(best)
    for level_s, each_s in ((draft_level_s + 0.25, request_s), (draft_level_s, request_s + 0.25)):
        slower = best_lengths(
            curve, tpot_slos_s, counts, acceptance, max_len, 40, level_s, slacks_s, each_s
        )
        assert slower is None or slower.rate <= found.rate
    assert rate(tuple(found.lengths.tolist())) == pytest.approx(best)
    assert all(
        (length == 0) == (count == 0) for length, count in zip(found.lengths, counts, strict=True)
    )


@pytest.mark.parametrize(
    ("curve", "tiers", "counts", "acceptance", "max_len", "level_s", "expected"),
    [
        (affine, (), (), 0.5, 4, 0.0, 40 / (0.25 + 40 / 64)),
        (staircase, (), (), 0.5, 4, 0.0, 24 / 0.625),  # larger steps are slower per token
        (affine, (0.5,), (3,), 0.5, 1, 0.0, 13 / 0.5),  # 0.5 s hold 16 tokens, of which 3 decode
        (affine, (0.5,), (17,), 0.5, 1, 0.0, -math.inf),
        # Steps of 0.5 s: of ten requests with 2.0 s a quarter is due in each.
        (affine, (0.5, 2.0), (2, 10), 0.0, 1, 0.0, (16 - 2 - 10 / 4) / 0.5),
        # Chains of 2 commit 1.5 tokens: 0.375 s per token allow steps of 0.5625 s, 20 tokens.
        (affine, (0.375,), (2,), 0.5, 2, 0.0, 16 / 0.5625),
        (affine, (0.375,), (2,), 0.5, 2, 0.25, 6 / 0.375),  # drafting takes too long
        (affine, (0.375, math.inf), (2, 3), 0.5, 2, 0.0, 13 / 0.5625),
    ],
)
def test_prefill_rate_of_hand_computed_steps(
    curve, tiers, counts, acceptance, max_len, level_s, expected
):
    rate = prefill_rate(curve, tiers, counts, acceptance, max_len, 40, level_s)
    assert rate == pytest.approx(expected)


def prefill_of_plain_steps(budget, duration_s, tpot_slos_s, num_steps):
    """Algorithm 2, one token at a time, of requests with these SLOs.  -> prompt tokens; None: it is
    infeasible
    """
    queue, prefill, done = (
        [(Fraction(0), request) for request in range(len(tpot_slos_s))],
        0,
        [0] * len(tpot_slos_s),
    )
    for step in range(num_steps):
        end_s = (step + 1) * duration_s
        left = budget
        while queue and min(queue)[0] < end_s:  # [FIX] printed: due >= the step's begin
            if not left:
                return None
            due_s, request = min(queue)
            queue.remove((due_s, request))
            left -= 1
            done[request] += 1
            assert (
                end_s <= done[request] * tpot_slos_s[request]
            )  # the token is there when it is due
            queue.append((due_s + tpot_slos_s[request], request))
        prefill += left
    return prefill


@given(
    curve=st.sampled_from([affine, staircase]),
    tiers=st.lists(st.tuples(st.integers(12, 90), st.integers(0, 4)), min_size=1, max_size=3),
    max_tokens=st.integers(1, 40),
)
@settings(deadline=None, max_examples=quick_or(26, 80))
def test_plain_rate_is_that_of_the_best_steps_of_what_is_due(curve, tiers, max_tokens):
    tpot_slos_s = [Fraction(slo, 32) for slo, count in tiers for _ in range(count)]
    tightest = min(tpot_slos_s, default=None)
    num_steps = 60
    rates = list[float]()
    for budget in range(1, max_tokens + 1):
        duration_s = Fraction(float(curve(np.array([budget]))[0]))
        if tightest is None or duration_s <= tightest:
            prefill = prefill_of_plain_steps(budget, duration_s, tpot_slos_s, num_steps)
            rates += [] if prefill is None else [float(prefill / (num_steps * duration_s))]
    rate = prefill_rate(
        curve,
        tuple(slo / 32 for slo, _ in tiers),
        tuple(count for _, count in tiers),
        0.0,
        1,
        max_tokens,
    )
    if not rates:
        assert rate == -math.inf
        return
    # Of every request at most one token more than its share, the first, which is due at once.
    assert (
        max(rates)
        <= rate + 1e-9
        <= max(rates) + len(tpot_slos_s) / (num_steps * curve(np.array([1]))[0]) + 2e-9
    )


def test_prefill_rate_of_a_measured_curve():
    curve = LatencyCurve.fit([1, 8, 64, 512], [0.02, 0.02, 0.03, 0.12])
    targets = (0.05, 0.1)
    assert prefill_rate(curve, targets, (0, 0), 0.7, 6, 512) == pytest.approx(512 / 0.12)
    dipping = prefill_rate(
        lambda n: np.where(n == 9, 0.001, curve(n)), targets, (1, 1), 0.7, 6, 512
    )
    assert dipping == prefill_rate(curve, targets, (1, 1), 0.7, 6, 512)  # as if it never fell
