"""Promises with a probability: the share of an SLO that is planned with, and what is learned from the outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_slospec.algo.metrics import WINDOW
from hf_slospec.algo.windows import planned_share
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.request import Request, RequestParams, Stage
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler
from hf_slospec.engine.scheduling.promises import LEARNED, MARGIN, SPREAD, Promises
from hf_slospec.engine.step_times import RecentSteps
from tests.support.toys.engine import commit
from tests.support.toys.served import ROOMY, Served

SLO_S = 2.0


def request_of(index: int = 0) -> Request:
    return Request(index, RequestParams([1], 100, (Stage(SLO_S),)))


def break_promise(request: Request) -> None:
    commit(request, [0], 0.0)
    commit(request, [0] * WINDOW, 1e3)


def promised(served: Served, **fields: object) -> Request:
    return served.add(**{"new": 40, "tpot_slo_s": SLO_S, **fields})


class Promising(Served):
    """An engine that promises a probability."""

    def __init__(self, probability: float | None):
        super().__init__()
        self.scheduler = self.engine.scheduler = ContinuousScheduler(
            ROOMY, self.engine.costs, guarantee=probability
        )


def test_without_a_probability_the_margin_is_constant_and_nothing_is_promised() -> None:
    promises, request = Promises(None, RecentSteps()), request_of()
    promises.make(request, SLO_S, 0.0)
    break_promise(request)
    promises.observe()
    assert promises.share(SLO_S) == MARGIN
    assert request.promised is None


def test_the_share_follows_from_what_varied() -> None:
    recent = RecentSteps()
    recent.committed, recent.step_variance = np.array([0.0, 0.3, 0.2, 0.5]), 0.04
    promises = Promises(0.9, recent)
    assert promises.share(SLO_S) == planned_share(0.9, recent.committed, 0.2, SPREAD, promises.output_tokens)


@pytest.mark.parametrize("probability", [0.8, 0.95])
def test_broken_promises_lower_the_share_of_their_slo_at_once(probability: float) -> None:
    promises, broken, open_ = Promises(probability, RecentSteps()), request_of(0), request_of(1)
    before = promises.share(SLO_S), promises.share(9.0)
    for request in (broken, open_):
        promises.make(request, SLO_S, 0.0)
        assert request.promised == probability
    break_promise(broken)
    for _ in range(2):
        promises.observe()  # learns once
    assert promises.share(SLO_S) == pytest.approx(before[0] * math.exp(-LEARNED * probability))
    assert promises.share(9.0) == before[1]


def test_a_kept_promise_counts_if_another_request_was_refused_meanwhile() -> None:
    promises = Promises(0.8, RecentSteps())
    share = promises.share(SLO_S)
    for refused_s, factor in ((1.0, 1.0), (3.0, math.exp(LEARNED * 0.2))):
        request = request_of()
        promises.make(request, SLO_S, 2.0)
        promises.refused_s = refused_s
        commit(request, [0], 0.0)
        request.finish_reason = "stop"
        promises.end(request)
        assert promises.share(SLO_S) == pytest.approx(share * factor)


def test_cancelled_requests_and_those_without_an_slo_teach_nothing() -> None:
    promises, cancelled, without = Promises(0.8, RecentSteps()), request_of(), Request(1, RequestParams([1], 9))
    share = promises.share(SLO_S)
    promises.make(cancelled, SLO_S, 0.0)
    promises.make(without, math.inf, 0.0)
    promises.refused_s = 1.0
    cancelled.end(None)
    promises.end(cancelled)
    without.finish_reason = "stop"
    promises.end(without)
    assert promises.share(SLO_S) == share
    assert without.promised is None


def test_the_share_converges_to_the_one_that_keeps_the_promised_part() -> None:
    """A process whose promises are kept below a share of 0.6 and above it with a probability of a half."""
    rng, promises, kept = np.random.default_rng(0), Promises(0.9, RecentSteps()), []
    for index in range(4000):
        request = request_of(index)
        promises.make(request, SLO_S, float(index))
        promises.refused_s = float(index)
        kept.append(bool(promises.share(SLO_S) < 0.6 or rng.random() < 0.5))
        commit(request, [0], 0.0)
        commit(request, [0] * WINDOW, 0.0 if kept[-1] else 1e3)
        promises.observe()
        request.finish_reason = "stop"
        promises.end(request)
    assert np.mean(kept[1000:]) == pytest.approx(0.9, abs=0.01)


def test_the_batcher_promises_and_reports() -> None:
    served = Promising(0.9)
    easy, hopeless, free = promised(served), promised(served, index=1, tpot_slo_s=1e-3), served.add(2, new=12)
    served.run()
    assert (easy.metrics().promised, easy.metrics().windows_kept) == (0.9, True)
    assert (hopeless.metrics().promised, hopeless.metrics().windows_kept) == (None, False)
    assert (free.metrics().promised, free.metrics().windows_kept) == (None, None)


def test_a_higher_probability_makes_fewer_promises() -> None:
    numbers = []
    for probability in (None, 0.5, 0.999):
        served = Promising(probability)
        requests = [promised(served, index=index, tpot_slo_s=1.6) for index in range(8)]
        served.step()
        numbers.append(sum(bool(request.is_guaranteed) for request in requests))
    assert numbers[0] >= numbers[1] > numbers[2]


def test_a_request_that_has_begun_without_a_promise_gets_none() -> None:
    request, promises = request_of(), Promises(0.9, RecentSteps())
    commit(request, [0], 0.0)
    promises.make(request, SLO_S, 1.0)
    assert request.promised is None


def test_prompts_leave_time_for_promised_windows() -> None:
    """While a window is behind, only as much is prefilled as the prompt's own SLO needs."""
    worst = {}
    for probability in (None, 0.9):
        served = Promising(probability)
        request = promised(served, tpot_slo_s=1.5)
        for _ in range(4):
            served.step()
        for index in range(1, 4):
            served.add(index, prompt=80, new=2)
        served.run()
        worst[probability] = request.metrics().worst_tpot_s
    assert worst[0.9] <= 1.5
    assert worst[0.9] <= worst[None]


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.5, 95])
def test_probabilities_lie_between_0_and_1(bad: float) -> None:
    with pytest.raises(ValueError, match="guarantee"):
        SLOSpecConfig(guarantee=bad)


def test_only_admission_by_slo_can_promise() -> None:
    with pytest.raises(ValueError, match="admission 'slo'"):
        SLOSpecConfig(guarantee=0.9, admission="fcfs")
