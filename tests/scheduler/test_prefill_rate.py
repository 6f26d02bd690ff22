"""Prefill rates against enumerated schedules."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.scheduler.admission import prefill_rate
from tests.support.toys.trees import affine, staircase


def best_schedule(seconds, tpot_slos_s, counts, acceptance, max_len, draft_level_s):
    """Over all lengths of chains and over durations of a step: every exact one and a grid between.

    Who decodes plainly takes part when it is due.
    """
    best = -math.inf
    tiers = [tier for tier, count in enumerate(counts) if count]
    for lengths in itertools.product(range(1, max_len + 1), repeat=len(tiers)):
        paces = [
            tpot_slos_s[tier] * sum(acceptance**k for k in range(length))
            for tier, length in zip(tiers, lengths, strict=True)
        ]
        load = sum(counts[tier] * length for tier, length in zip(tiers, lengths, strict=True))
        step_s = seconds + (max(lengths, default=1) - 1) * draft_level_s
        is_plain = [
            length == 1 and tpot_slos_s[tier] < math.inf
            for tier, length in zip(tiers, lengths, strict=True)
        ]
        plain = [tier for tier, is_due in zip(tiers, is_plain, strict=True) if is_due]
        num_due, due = (
            sum(counts[tier] for tier in plain),
            sum(counts[tier] / tpot_slos_s[tier] for tier in plain),
        )
        for duration_s in (*step_s, *np.linspace(0.05, 2 * step_s[-1], 100)):
            budget = (
                int(np.count_nonzero(step_s <= duration_s)) - load
            )  # beside a token for all that decode plainly
            if duration_s <= min(paces, default=math.inf) and budget >= 0:
                best = max(best, (budget + num_due) / duration_s - due)
    return best


@given(
    curve=st.sampled_from([affine, staircase]),
    tiers=st.lists(
        st.tuples(st.sampled_from([0.25, 0.375, 0.5, 0.75, 1.5, 4.0, math.inf]), st.integers(0, 5)),
        max_size=3,
    ),
    acceptance=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    max_len=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    draft_level_s=st.sampled_from([0.0, 0.0625, 0.125]),
)
@settings(deadline=None, max_examples=80)
def test_prefill_rate_is_that_of_the_best_schedule(
    curve, tiers, acceptance, max_len, max_tokens, draft_level_s
):
    tpot_slos_s = [target for target, _ in tiers]
    counts = [count for _, count in tiers]
    rate = prefill_rate(curve, tpot_slos_s, counts, acceptance, max_len, max_tokens, draft_level_s)
    seconds = curve(np.arange(1, max_tokens + 1))
    assert rate == pytest.approx(
        best_schedule(seconds, tpot_slos_s, counts, acceptance, max_len, draft_level_s)
    )

    # More decoding requests, shorter chains, smaller steps and slower drafting never raise it.
    for tier in range(len(counts)):
        more = [count + (i == tier) for i, count in enumerate(counts)]
        assert (
            prefill_rate(curve, tpot_slos_s, more, acceptance, max_len, max_tokens, draft_level_s)
            <= rate
        )
    assert (
        prefill_rate(
            curve, tpot_slos_s, counts, acceptance, max(max_len - 1, 1), max_tokens, draft_level_s
        )
        <= rate
    )
    assert (
        prefill_rate(
            curve, tpot_slos_s, counts, acceptance, max_len, max(max_tokens - 1, 1), draft_level_s
        )
        <= rate
    )
    assert (
        prefill_rate(
            curve, tpot_slos_s, counts, acceptance, max_len, max_tokens, draft_level_s + 0.25
        )
        <= rate
    )


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
@settings(deadline=None, max_examples=80)
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
        curve, [slo / 32 for slo, _ in tiers], [count for _, count in tiers], 0.0, 1, max_tokens
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


def test_loose_tiers_are_not_charged_for_every_step():
    # Steps of 0.5 s hold 16 tokens. Of ten requests with 2.0 s a quarter is due in each.
    tiers = [0.5, 2.0]
    counts = [2, 10]
    assert prefill_rate(affine, tiers, counts, 0.0, 1, 40) == pytest.approx((16 - 2 - 10 / 4) / 0.5)
    assert (
        prefill_rate(affine, tiers, [2, 15], 0.0, 1, 40) == -math.inf
    )  # the first step must hold all


def test_prefill_rate_without_decoding_requests_is_that_of_the_best_step():
    assert prefill_rate(affine, [], [], 0.5, 4, 40) == 40 / (0.25 + 40 / 64)
    assert prefill_rate(affine, [0.01, math.inf], [0, 0], 0.5, 4, 40) == 40 / (0.25 + 40 / 64)
    assert (
        prefill_rate(staircase, [], [], 0.5, 4, 40) == 24 / 0.625
    )  # larger steps are slower per token


def test_prefill_rate_beside_plain_decoding():
    # 0.5 s hold 16 tokens, of which 3 are decoded.
    assert prefill_rate(affine, [0.5], [3], 0.5, 1, 40) == 13 / 0.5
    assert prefill_rate(affine, [0.5], [16], 0.5, 1, 40) == 0.0  # sustained, without any prompt
    assert prefill_rate(affine, [0.5], [17], 0.5, 1, 40) == -math.inf
    assert prefill_rate(affine, [0.25], [1], 0.5, 1, 40) == -math.inf
    # A step that is full before the target is due does not wait for it, and leaves out who is not
    # due.
    assert prefill_rate(affine, [60.0], [3], 0.5, 1, 40) == 40 / (0.25 + 40 / 64) - 3 / 60.0


def test_prefill_rate_speculates_where_that_pays():
    # Chains of 2 commit 1.5 tokens: 0.375 s a token allows steps of 0.5625 s, 20 tokens, against 8
    # in 0.375 s.
    assert prefill_rate(affine, [0.375], [2], 0.5, 2, 40) == 16 / 0.5625
    assert prefill_rate(affine, [0.375], [2], 0.5, 2, 40, draft_level_s=0.0625) == 12 / 0.5625
    assert prefill_rate(affine, [0.375], [2], 0.5, 2, 40, draft_level_s=0.25) == pytest.approx(
        6 / 0.375
    )
    assert prefill_rate(affine, [0.375], [2], 0.0, 4, 40) == pytest.approx(6 / 0.375)
    assert prefill_rate(affine, [0.25], [1], 0.5, 2, 40) == pytest.approx(
        6 / 0.375
    )  # plain decoding is too slow


def test_requests_without_target_take_one_token_per_step_and_limit_nothing():
    assert prefill_rate(affine, [0.375, math.inf], [2, 3], 0.5, 2, 40) == 13 / 0.5625
    assert prefill_rate(affine, [math.inf], [3], 0.5, 4, 40) == 37 / (0.25 + 40 / 64)
    assert prefill_rate(affine, [math.inf, 0.01], [3, 0], 0.5, 4, 40) == 37 / (0.25 + 40 / 64)


def test_prefill_rate_of_a_measured_curve():
    curve = LatencyCurve.fit([1, 8, 64, 512], [0.02, 0.02, 0.03, 0.12])
    targets = (0.05, 0.1)
    rates = [prefill_rate(curve, targets, (n, n), 0.7, 6, 512, 0.002) for n in range(0, 200, 4)]
    assert all(fewer >= more for fewer, more in itertools.pairwise(rates))
    assert rates[0] == pytest.approx(512 / 0.12)
    assert rates[-1] == -math.inf
    dipping = prefill_rate(
        lambda n: np.where(n == 9, 0.001, curve(n)), targets, (1, 1), 0.7, 6, 512
    )
    assert dipping == prefill_rate(curve, targets, (1, 1), 0.7, 6, 512)  # as if it never fell
