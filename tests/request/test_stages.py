"""Stages of requests: when they end, and when they are attained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from tests.support.toys.engine import commit


def request_of(*stages, new=20, **fields):
    return Request(0, RequestParams([0], new, stages, **fields))


@pytest.mark.parametrize(
    ("times", "attained"),
    [
        ([0.0, 0.5, 1.0, 3.0, 5.0], True),
        ([0.0, 0.5, 1.1, 2.0, 3.0], False),  # the first stage is late, the last one in time
        ([0.0, 0.5, 1.0, 3.0, 5.1], False),
        ([0.0, 0.9, 1.0, 4.5, 5.0], True),  # targets hold for averages
    ],
)
@pytest.mark.parametrize(
    "stage", [Stage(0.5, 3), Stage(0.5, is_over=lambda tokens: tokens[-1] == 9)]
)
def test_every_stage_has_to_be_attained(stage, times, attained):
    request = Request(0, RequestParams([9, 9], 20, (stage, Stage(2.0))))
    targets = [request.pace_s]
    for token, now_s in zip((5, 7, 9, 9, 8), times, strict=True):
        commit(request, [token], now_s)
        targets.append(request.pace_s)
    assert targets == [0.5, 0.5, 0.5, 2.0, 2.0, 2.0]
    assert request.metrics().attained is attained
    assert request.metrics().tpot_slo_s == 2.0
    assert request.metrics().slack_s == pytest.approx(2 * 2.0 - (times[-1] - times[2]))
    assert request.decoded(10.0) == pytest.approx((10.0 - times[2], 2))


def test_every_token_of_a_step_counts_for_its_own_stage():
    request = request_of(Stage(2.0, 3), Stage(None, 2), Stage(1.0))
    commit(request, [1], 0.0)
    # Two of these make the stage's three, the third is the next stage's first.
    commit(request, [1, 1, 1], 4.0)
    assert request.pace_s is None
    assert request.decoded(5.0) == (1.0, 1)
    commit(request, [1, 1], 99.0)  # no promise, nothing to be late with
    assert request.pace_s == 1.0
    assert request.decoded(99.5) == (0.5, 1)
    commit(request, [1], 101.0)
    assert request.metrics().attained is True
    commit(request, [1], 102.1)
    assert request.metrics().attained is False
    late = request_of(Stage(1.9, 3), Stage(None))
    commit(late, [1], 0.0)
    commit(late, [1, 1, 1, 1], 4.0)
    assert late.metrics().attained is False  # its third token came 4 s after its first


def test_a_step_may_end_several_stages():
    def is_nine(tokens):
        return tokens[-1] == 9

    stages = (Stage(0.5, 2), Stage(0.6, is_over=is_nine), Stage(0.7, ttft_slo_s=2.0), Stage(0.8))
    request = Request(0, RequestParams([0], 20, stages))
    commit(request, [1], 0.0)
    commit(request, [1, 9], 0.4)  # the marker of the second stage is its only token
    assert request.pace_s == 2.0 and request.stage_due_s == 2.4
    resumed = Request(0, request.params, 10.0, request.progress(1.0))
    assert resumed.pace_s == 2.0 and resumed.stage_due_s == 12.0
    commit(request, [1], 1.0)
    assert Request(0, request.params, 10.0, request.progress(1.0)).pace_s == 0.7


@pytest.mark.parametrize(
    ("first_s", "next_s", "attained"),
    [(4.0, 4.5, True), (4.1, 4.2, False), (2.0, 2.5, True), (2.0, 2.6, False)],
)
@pytest.mark.parametrize("num_first", [1, 2])
def test_a_later_stage_may_have_a_ttft_slo(first_s, next_s, attained, num_first):
    request = request_of(Stage(None, 1), Stage(0.5, ttft_slo_s=3.0))
    assert request.params.has_slo and request.params.stage_slos_s == [0.5, 3.0]
    commit(request, [1], 1.0)
    assert (request.pace_s, request.stage_due_s, request.num_left_in_stage) == (3.0, 4.0, 1)
    assert request.paced(2.0) == (1.0, 0, 1)
    commit(request, [1] * num_first, first_s)
    assert (request.pace_s, request.stage_due_s) == (0.5, math.inf)
    # TPOT counts from the first token on.
    assert request.decoded(first_s + 1.0) == (1.0, num_first - 1)
    commit(request, [1], next_s + 0.5 * (num_first - 1))
    assert request.metrics().attained is attained


def test_a_first_token_within_the_step_that_ended_the_stage_before_is_in_time():
    request = request_of(Stage(None, 2), Stage(0.5, ttft_slo_s=1e-6))
    commit(request, [1], 0.0)
    commit(request, [1, 1, 1], 5.0)
    assert request.pace_s == 0.5 and request.decoded(5.5) == (0.5, 1)
    assert request.metrics().attained is True


def test_windows_of_ten_tokens_leave_out_the_wait_for_a_first_token():
    request = request_of(Stage(None, 1), Stage(0.1, ttft_slo_s=9.0), new=40)
    request.window_guarantee = 0.9
    commit(request, [1], 0.0)
    assert not request.has_open_guarantee
    commit(request, [1], 8.0)
    assert request.has_open_guarantee
    commit(request, [1] * 10, 8.9)
    assert request.metrics().windows_kept is True
    commit(request, [1] * 10, 10.0)
    assert request.metrics().windows_kept is False


def test_tokens_of_the_next_stage_complete_no_window():
    request = request_of(Stage(0.1, 6), Stage(None), new=40)
    request.window_guarantee = 0.9
    commit(request, [1], 0.0)
    commit(request, [1] * 4, 2.0)  # late, but five tokens are no window
    commit(request, [1] * 9, 2.1)
    assert request.metrics().windows_kept is True


def test_parts_of_a_continued_request_count_together_and_the_pause_in_none():
    first = request_of(Stage(0.5))
    commit(first, [1], 0.0)
    commit(first, [1], 0.5)
    for times_s, slo_s, attained in (
        ((99.0, 99.5), 0.5, True),
        ((99.0, 99.6), 0.5, False),
        ((99.0, 200.0), None, True),
    ):
        second = Request(
            1, RequestParams([0, 1, 1, 7], 20, (Stage(slo_s),), earlier=first.metrics()), 98.0
        )
        for now_s in times_s:
            commit(second, [1], now_s)
        assert second.metrics().ttft_s == 1.0 and second.metrics().earlier == first.metrics()
        assert second.metrics().attained is (attained if slo_s else None)
        assert second.metrics().attained_throughout is attained
    commit(first, [1], 9.0)
    assert replace(second.metrics(), earlier=first.metrics()).attained_throughout is False
    assert request_of(Stage(None), new=2).metrics().attained_throughout is None


def test_stages_without_targets_attain_nothing():
    request = request_of(Stage(None, 1), Stage(None))
    commit(request, [1], 0.0)
    commit(request, [1], 1.0)
    assert request.metrics().attained is None
    assert request.metrics().slack_s is None


def test_an_e2e_slo_shares_the_time_that_is_left_among_the_tokens_that_are_left():
    request = Request(0, RequestParams([0], 11, (Stage(None),), e2e_slo_s=12.0), 1.0)
    assert request.pace_s is None and request.params.has_slo
    commit(request, [1], 3.0)  # 10 s for 10 tokens
    assert request.pace_s == pytest.approx(1.0)
    commit(request, [1] * 4, 12.0)
    assert request.pace_s == pytest.approx(1.0)
    elapsed_s, emitted, num_left = request.paced(12.0)
    # The time to the deadline.
    assert 1.0 * (emitted + num_left) - elapsed_s == pytest.approx(13.0 - 12.0)
    assert request.metrics().attained is True and request.metrics().tpot_slo_s is None
    commit(request, [1] * 6, 13.1)
    metrics = request.metrics()
    assert (
        metrics.attained is False
        and metrics.e2e_slo_s == 12.0
        and metrics.e2e_s == pytest.approx(12.1)
    )


def test_the_tighter_of_tpot_and_e2e_slos_sets_the_pace_and_each_counts():
    request = request_of(Stage(0.5, 3), Stage(None), new=11, e2e_slo_s=10.0)
    for token_s in (1.0, 1.5, 2.0):
        commit(request, [1], token_s)
        assert request.pace_s == (0.5 if token_s < 2.0 else 1.0)  # then 8 s for 8 tokens
    commit(request, [1] * 8, 10.0)
    assert request.metrics().attained is True
    late = request_of(Stage(0.5), new=3, e2e_slo_s=10.0)
    commit(late, [1], 1.0)
    commit(late, [1, 1], 2.5)  # within 10 s, but slower than a token per 0.5 s
    assert late.metrics().attained is False


def test_an_e2e_slo_that_is_missed_before_the_first_token_asks_for_nothing():
    request = request_of(Stage(None), new=5, e2e_slo_s=2.0)
    commit(request, [1], 2.0)
    assert request.pace_s is None
    single = request_of(Stage(None), new=1, e2e_slo_s=2.0)
    commit(single, [1], 1.0)
    assert single.pace_s is None and single.metrics().attained is True


def test_a_resumed_request_keeps_its_e2e_deadline():
    request = Request(0, RequestParams([0], 11, e2e_slo_s=12.0), 1.0)
    commit(request, [1], 3.0)
    resumed = Request(0, request.params, 100.0, request.progress(8.0))
    assert resumed.pace_s == pytest.approx(1.0)
    commit(resumed, [1] * 10, 105.1)  # 7 s before it was resumed, and 5.1 s after
    assert resumed.metrics().attained is False and resumed.metrics().e2e_s == pytest.approx(12.1)
