"""Guarantees with a probability: the shares of SLOs that are planned with, and what is learned from
the outcomes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_slospec.engine.costs import RecentSteps
from hf_slospec.request.metrics import WINDOW, planned_share
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.request.state import RequestState
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.scheduler.guarantees import can_fall_back
from hf_slospec.scheduler.window_guarantees import (
    LEARNED,
    MARGIN,
    MAX_SHARE,
    SPREAD,
    WindowGuarantees,
)
from tests.support.toys.engine import commit
from tests.support.toys.served import ROOMY, Served

SLO_S = 2.0
TTFT_S = 5.0


def request_of(index=0):
    return Request(index, RequestParams([1], 100, (Stage(SLO_S),)))


def request_with_ttft(index):
    return Request(index, RequestParams([1], 100, (Stage(SLO_S),), ttft_slo_s=TTFT_S))


def break_guarantee(request):
    commit(request, [0], 0.0)
    commit(request, [0] * WINDOW, 1e3)


def guaranteed(served, **fields):
    return served.add(**{"new": 40, "tpot_slo_s": SLO_S, **fields})


class Guaranteeing(Served):
    """An engine that states a probability."""

    def __init__(self, probability, falls_back=False):
        super().__init__()
        self.scheduler = self.engine.scheduler = ContinuousScheduler(
            ROOMY, self.engine.costs, guarantee=probability, falls_back=falls_back
        )


def test_without_a_probability_the_margin_is_constant_and_nothing_is_guaranteed():
    windows = WindowGuarantees(None, RecentSteps())
    request = request_of()
    windows.give(request, SLO_S, 0.0)
    break_guarantee(request)
    windows.observe(1e3)
    assert windows.share(SLO_S) == MARGIN
    assert request.window_guarantee is None


def test_the_share_follows_from_what_varied():
    recent = RecentSteps()
    recent.committed = np.array([0.0, 0.3, 0.2, 0.5])
    recent.step_variance = 0.04
    windows = WindowGuarantees(0.9, recent)
    assert windows.share(SLO_S) == planned_share(
        0.9, recent.committed, 0.2, SPREAD, windows.output_tokens
    )


@pytest.mark.parametrize("probability", [0.8, 0.95])
def test_broken_guarantees_lower_the_share_of_their_slo_at_once(probability):
    windows, broken, open_ = (
        WindowGuarantees(probability, RecentSteps()),
        request_of(0),
        request_of(1),
    )
    before = windows.share(SLO_S), windows.share(9.0)
    for request in (broken, open_):
        windows.give(request, SLO_S, 0.0)
        assert request.window_guarantee == probability
    break_guarantee(broken)
    for _ in range(2):
        windows.observe(1e3)  # learns once, as another one is open
    assert windows.share(SLO_S) == pytest.approx(before[0] * math.exp(-LEARNED * probability))
    assert windows.share(9.0) == before[1]


@pytest.mark.parametrize("has_first_token", [True, False])
def test_late_first_tokens_lower_the_share_of_ttft_slos_once(has_first_token):
    windows, late, timely = (
        WindowGuarantees(0.9, RecentSteps()),
        request_with_ttft(0),
        request_with_ttft(1),
    )
    before = windows.first_share(), windows.share(SLO_S)
    for request in (late, timely):
        windows.give(request, SLO_S, 0.0)
    commit(timely, [0], TTFT_S)
    if has_first_token:
        commit(late, [0], 2 * TTFT_S)
    windows.observe(TTFT_S)
    assert windows.first_share() == (
        before[0] * math.exp(-LEARNED * 0.9) if has_first_token else before[0]
    )
    for _ in range(3):
        windows.observe(2 * TTFT_S)
    assert windows.first_share() == pytest.approx(before[0] * math.exp(-LEARNED * 0.9))
    assert windows.share(SLO_S) == before[1]
    assert late.window_guarantee == 0.9  # its windows are served as before


def test_a_kept_guarantee_raises_the_shares_of_its_slos_together_as_much_as_one():
    windows, late, kept = (
        WindowGuarantees(0.8, RecentSteps()),
        request_with_ttft(0),
        request_with_ttft(1),
    )
    for request in (late, kept):
        windows.give(request, SLO_S, 2.0)
    commit(kept, [0], 0.5)
    windows.observe(2 * TTFT_S)  # late has no token
    first = windows.first_share()
    share = windows.share(SLO_S)
    windows.refused_s = 3.0
    kept.state = RequestState.STOP
    windows.end(kept)
    assert windows.first_share() == pytest.approx(first * math.exp(LEARNED * 0.1))
    assert windows.share(SLO_S) == pytest.approx(share * math.exp(LEARNED * 0.1))


def test_many_kept_guarantees_do_not_hide_broken_ones():
    windows = WindowGuarantees(0.5, RecentSteps(), falls_back=True)
    before = windows.first_share(), windows.plain_share(SLO_S)
    assert windows.share(SLO_S) < MAX_SHARE
    for index in range(200):
        request = request_with_ttft(index)
        windows.give(request, SLO_S, 0.0)
        windows.refused_s = 1.0
        request.state = RequestState.STOP
        windows.end(request)
    assert (windows.first_share(), windows.plain_share(SLO_S)) == before
    share = windows.share(SLO_S)
    late = request_with_ttft(200)
    assert share == pytest.approx(MAX_SHARE)
    windows.give(late, SLO_S, 0.0)
    windows.observe(2 * TTFT_S)  # it has no token
    assert windows.first_share() < before[0]
    missed = request_of(201)
    windows.give(missed, SLO_S, 0.0)
    break_guarantee(missed)
    windows.observe(2e3)
    assert windows.share(SLO_S) < share


@pytest.mark.parametrize("probability", [None, 0.9])
def test_nothing_falls_back_unless_the_policy_does(probability):
    served = Guaranteeing(probability, falls_back=False)
    assert not can_fall_back(1e3, served.engine.costs, served.scheduler.windows)


@pytest.mark.parametrize("probability", [None, 0.9])
def test_steps_fall_back_where_plain_ones_keep_the_slo_and_use_most_of_the_machine(probability):
    served = Guaranteeing(probability, falls_back=True)
    costs = served.engine.costs
    windows = served.scheduler.windows
    possible = [can_fall_back(slo_s, costs, windows) for slo_s in (1e-3, 1.05, 1e3, math.inf)]
    assert possible == sorted(possible) and possible[0] is False and possible[-2:] == [True, True]


def test_a_kept_guarantee_counts_if_another_request_was_refused_meanwhile():
    windows = WindowGuarantees(0.8, RecentSteps())
    share = windows.share(SLO_S)
    for refused_s, factor in ((1.0, 1.0), (3.0, math.exp(LEARNED * 0.2))):
        request = request_of()
        windows.give(request, SLO_S, 2.0)
        windows.refused_s = refused_s
        commit(request, [0], 0.0)
        request.state = RequestState.STOP
        windows.end(request)
        assert windows.share(SLO_S) == pytest.approx(share * factor)


def test_cancelled_requests_and_those_without_an_slo_teach_nothing():
    windows, cancelled, without = (
        WindowGuarantees(0.8, RecentSteps()),
        request_of(),
        Request(1, RequestParams([1], 9)),
    )
    share = windows.share(SLO_S)
    windows.give(cancelled, SLO_S, 0.0)
    windows.give(without, math.inf, 0.0)
    windows.refused_s = 1.0
    cancelled.end(None)
    windows.end(cancelled)
    without.state = RequestState.STOP
    windows.end(without)
    assert windows.share(SLO_S) == share
    assert without.window_guarantee is None


def test_the_share_converges_to_the_one_that_keeps_the_stated_part():
    """A process whose guarantees are kept below a share of 0.6 and above it with a probability of a
    half.
    """
    rng = np.random.default_rng(0)
    windows = WindowGuarantees(0.9, RecentSteps())
    kept = []
    for index in range(4000):
        request = request_of(index)
        windows.give(request, SLO_S, float(index))
        windows.refused_s = float(index)
        kept.append(bool(windows.share(SLO_S) < 0.6 or rng.random() < 0.5))
        commit(request, [0], 0.0)
        commit(request, [0] * WINDOW, 0.0 if kept[-1] else 1e3)
        windows.observe(1e3)
        request.state = RequestState.STOP
        windows.end(request)
    assert np.mean(kept[1000:]) == pytest.approx(0.9, abs=0.01)


def test_the_batcher_guarantees_and_reports():
    served = Guaranteeing(0.9)
    easy, hopeless, free = (
        guaranteed(served),
        guaranteed(served, index=1, tpot_slo_s=1e-3),
        served.add(2, new=12),
    )
    served.run()
    assert (easy.metrics().window_guarantee, easy.metrics().windows_kept) == (0.9, True)
    assert (hopeless.metrics().window_guarantee, hopeless.metrics().windows_kept) == (None, False)
    assert (free.metrics().window_guarantee, free.metrics().windows_kept) == (None, None)


def test_a_higher_probability_makes_fewer_guarantees():
    numbers = []
    for probability in (None, 0.5, 0.999):
        served = Guaranteeing(probability)
        requests = [guaranteed(served, index=index, tpot_slo_s=1.6) for index in range(8)]
        served.step()
        numbers.append(sum(bool(request.is_guaranteed) for request in requests))
    assert numbers[0] >= numbers[1] > numbers[2]


def test_requests_whose_windows_have_begun_take_no_capacity_for_guarantees():
    served = Guaranteeing(0.9)
    begun = guaranteed(served, tpot_slo_s=1.05)  # at once, it is impossible
    while begun.num_emitted < 3:
        served.step()
    assert not begun.is_guaranteed
    served.scheduler.windows._planned = 1.0
    served.scheduler.windows._review_at = 10**9
    guaranteed(served, index=1)
    served.step()
    assert not begun.is_guaranteed
    assert served.scheduler.running[1].window_guarantee == 0.9


def test_a_request_that_has_missed_a_window_elsewhere_gets_no_guarantee():
    late = request_of()
    break_guarantee(late)
    windows, resumed = (
        WindowGuarantees(0.9, RecentSteps()),
        Request(0, late.params, 1e3, late.progress(1e3)),
    )
    assert windows.is_too_late(resumed) and not windows.is_too_late(request_of())
    assert not WindowGuarantees(None, RecentSteps()).is_too_late(resumed)


def test_corrections_fade_without_guarantees_so_that_none_excludes_an_slo_for_good():
    windows = WindowGuarantees(0.9, RecentSteps())
    share = windows.share(SLO_S)
    for index in range(50):
        request = request_of(index)
        windows.give(request, SLO_S, 0.0)
        break_guarantee(request)
    windows.observe(1e3)
    assert windows.share(SLO_S) < 0.2 * share
    for _ in range(1000):
        windows.observe(1e3)
    assert windows.share(SLO_S) == pytest.approx(share, rel=0.01)


def test_prompts_leave_time_for_guaranteed_windows():
    """While a window is behind, only as much is prefilled as the prompt's own SLO needs."""
    worst = {}
    for probability in (None, 0.9):
        served = Guaranteeing(probability)
        served.scheduler.windows._planned = 0.9
        served.scheduler.windows._review_at = 10**9
        request = guaranteed(served, tpot_slo_s=1.5)
        served.step(4)
        for index in range(1, 4):
            served.add(index, prompt=80, new=2)
        served.run()
        worst[probability] = request.metrics().worst_tpot_s
    assert worst[0.9] <= 1.5
    assert worst[0.9] <= worst[None]
