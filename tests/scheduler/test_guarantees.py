"""Guarantees under continuous batching: which requests get one, whose room it takes, and that no
request starves.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hf_slospec.engine.costs import RecentSteps
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import MAX_PREEMPTED
from hf_slospec.scheduler.guarantees import (
    MAX_CANDIDATES,
    first_token_slo_s,
    lost_s,
    prefill_deadline_s,
    tightest_tpot_slo_s,
)
from tests.support.toys.served import Served


def test_unattainable_slos_are_not_guaranteed_and_the_request_is_still_served():
    served = Served()
    impossible = served.add(0, prompt=100, tpot_slo_s=1e-6, ttft_slo_s=1e-6)
    easy = served.add(1, tpot_slo_s=1e3, ttft_slo_s=1e3)
    served.run()
    assert (impossible.metrics().guaranteed, impossible.metrics().attained) == (False, False)
    assert (easy.metrics().guaranteed, easy.metrics().attained) == (True, True)


def test_no_more_ttft_slos_are_guaranteed_than_can_be_met():
    served = Served(max_batch=64, prefill_chunk=64)
    requests = [
        served.add(index, prompt=60, new=4, ttft_slo_s=14.0) for index in range(8)
    ]  # about 6 s each
    served.run()
    guaranteed = [request for request in requests if request.metrics().guaranteed]
    assert 0 < len(guaranteed) < len(requests)
    assert all(request.metrics().attained for request in guaranteed)


@pytest.mark.parametrize("kind", ["value", "continues a guaranteed one", "continues another"])
def test_of_two_requests_the_more_valuable_is_guaranteed(kind):
    served = Served(max_batch=64, prefill_chunk=64)
    requests = [
        served.add(index, prompt=60, new=4, ttft_slo_s=8.0) for index in range(2)
    ]  # about 6 s each
    if kind == "value":
        requests[1].params = replace(requests[1].params, value=2)
    else:
        earlier = replace(requests[0].metrics(), guaranteed=kind == "continues a guaranteed one")
        requests[1].params = replace(requests[1].params, earlier=earlier)
    served.run()
    guaranteed = [request.metrics().guaranteed for request in requests]
    assert guaranteed == ([True, False] if kind == "continues another" else [False, True])
    assert requests[1].metrics().guaranteed_throughout == (kind != "continues another")
    assert all(request.metrics().attained for request in requests if request.metrics().guaranteed)


@pytest.mark.parametrize(
    ("step_s", "ttft_slo_s", "guaranteed"),
    [(0.0, 20.0, True), (10.0, 20.0, True), (30.0, 20.0, True), (30.0, 1.1, False)],
)
def test_a_ttft_slo_is_guaranteed_for_the_end_of_a_step(
    monkeypatch, step_s, ttft_slo_s, guaranteed
):
    """The next step may be as short as that of the prompt alone, which takes 1 s."""
    monkeypatch.setattr(RecentSteps, "observe", lambda self, _: setattr(self, "step_s", step_s))
    served = Served()
    served.add(0, new=60, tpot_slo_s=1e3, ttft_slo_s=1e3)
    served.step(8)
    late = served.add(1, prompt=1, new=2, ttft_slo_s=ttft_slo_s)
    served.run()
    assert late.metrics().guaranteed is guaranteed


def test_a_guaranteed_request_preempts_best_effort_which_resumes_without_repeating():
    served = Served(max_batch=1)
    spare = served.add(0, new=12)
    served.step(5)
    emitted = list(spare.tokens)
    urgent = served.add(1, new=3, tpot_slo_s=1e3, ttft_slo_s=1e3)
    served.step()
    assert served.scheduler.running == [urgent]
    assert spare.stats.num_preempted == 1
    assert served.toy.cached.keys() == {urgent}
    served.run()
    assert spare.tokens[: len(emitted)] == emitted
    assert spare.metrics().preempted == 1
    assert urgent.stats.last_token_s < spare.stats.last_token_s


def test_a_starving_request_goes_first_and_is_not_preempted():
    served = Served(max_batch=1, starvation_s=20.0)
    starving = None
    for index in range(100):  # promises without end
        served.add(2 * index, new=3, tpot_slo_s=1e3, ttft_slo_s=1e3)
        if index == 3:
            starving = served.add(999, new=3)
        served.step(3)
        if starving is not None and starving.is_finished:
            break
    assert starving is not None and starving.is_finished
    assert starving.metrics().ttft_s <= 20.0 + 10.0  # and what ran then
    assert starving.stats.num_preempted == 0


def test_a_request_is_preempted_at_most_max_preempted_times():
    served = Served(max_batch=1)
    spare = served.add(0, new=40)
    for index in range(1, 20):
        while not (spare.is_decoding or spare.is_finished):
            served.step()
        served.add(index, new=2, tpot_slo_s=1e3, ttft_slo_s=1e3)
        served.step()
    served.run()
    assert spare.stats.num_preempted == MAX_PREEMPTED


def test_guaranteed_requests_without_a_deadline_do_not_starve():
    served = Served("edf", max_batch=1, starvation_s=20.0)
    late = None
    for index in range(60):
        served.add(2 * index, new=3, ttft_slo_s=1e3)
        if index == 2:
            late = served.add(999, new=3, tpot_slo_s=1e3)
        served.step(3)
    assert late is not None
    assert late.is_finished


def test_unattainable_requests_take_no_candidate_places_from_others():
    served = Served(max_batch=64, prefill_chunk=64)
    for index in range(MAX_CANDIDATES + 4):
        served.add(
            index, new=20, tpot_slo_s=1e-6
        )  # without a deadline, so they never become too late
    fine = served.add(999, new=5, tpot_slo_s=1e3)
    served.step()
    assert fine.is_guaranteed


def test_a_burst_larger_than_one_decision_is_guaranteed_whole():
    served = Served(max_batch=64, prefill_chunk=64)
    requests = [
        served.add(index, new=30, tpot_slo_s=1e3, ttft_slo_s=1e4)
        for index in range(3 * MAX_CANDIDATES)
    ]
    served.step(4)
    assert all(request.is_guaranteed for request in requests)


def test_a_best_effort_prompt_is_prefilled_although_guaranteed_ones_keep_coming():
    served = Served("edf", prefill_chunk=16)
    decoding = served.add(
        0, new=10**4, tpot_slo_s=1.05
    )  # always slightly late, so there is nothing to spare
    spare = served.add(1, prompt=100, new=2)
    for index in range(400):
        if index % 3 == 0:
            served.add(index + 2, prompt=20, new=2, ttft_slo_s=1e3)
        served.step()
    assert spare.num_emitted
    decoding.end(None)
    served.engine.retire([decoding])


@pytest.mark.parametrize("times_preempted", [0, MAX_PREEMPTED])
def test_slots_of_protected_requests_are_not_guaranteed_to_others(times_preempted):
    served = Served(max_batch=1)
    holder = served.add(0, new=500)
    for index in range(times_preempted):
        served.step(5)
        served.add(index + 1, new=2, tpot_slo_s=1e3, ttft_slo_s=1e3)
        served.step(5)
    served.step(5)
    assert (holder.stats.num_preempted, holder.is_decoding) == (times_preempted, True)
    late = served.add(9, new=4, tpot_slo_s=1e3, ttft_slo_s=1e3)
    served.step()
    assert late.is_guaranteed == (times_preempted < MAX_PREEMPTED)


def test_a_starving_guaranteed_request_is_not_preempted_once_it_runs():
    served = Served("priority", max_batch=1, starvation_s=2.0)
    first = served.add(0, new=3, ttft_slo_s=1e3, priority=-2)
    served.step()
    starving = served.add(1, ttft_slo_s=1e3)
    urgent = None
    while not first.is_finished:
        served.step()
        if served.clock.now_s >= 2.0 and urgent is None:
            urgent = served.add(2, ttft_slo_s=1e3, priority=-1)
    served.run()
    assert starving.stats.num_preempted == 0
    assert urgent is not None and urgent.is_finished


def test_slots_of_a_protected_and_guaranteed_request_count_once():
    served = Served(max_batch=3, starvation_s=0.5)
    early = [
        served.add(index, new=40, tpot_slo_s=1e-6) for index in range(2)
    ]  # which cannot be met: best effort
    served.clock.now_s = 1.0
    served.step()
    assert all(request in served.scheduler._protected for request in early)
    for request in early:  # as if their SLO could be met by now
        request.is_guaranteed = True
    late = served.add(9, new=4, tpot_slo_s=1e3, ttft_slo_s=1e3)
    for request in early:
        request.params = replace(request.params, stages=(Stage(1e3),))
    served.step()
    assert late.is_guaranteed


def test_an_e2e_slo_is_planned_for_the_first_token_and_the_others():
    served = Served()
    alone = served.add(0, new=11, e2e_slo_s=40.0)
    assert first_token_slo_s(alone) == 10.0 and tightest_tpot_slo_s(alone) == pytest.approx(3.0)
    assert prefill_deadline_s(alone) == 10.0 and lost_s(alone) == 40.0
    both = served.add(1, new=11, ttft_slo_s=30.0, tpot_slo_s=2.0, e2e_slo_s=40.0)
    assert first_token_slo_s(both) == lost_s(both) == 30.0 and tightest_tpot_slo_s(
        both
    ) == pytest.approx(1.0)
    single = served.add(2, new=1, e2e_slo_s=40.0)
    assert first_token_slo_s(single) == 40.0 and tightest_tpot_slo_s(single) == math.inf


def test_e2e_slos_are_guaranteed_if_they_can_be_met_and_met_then():
    served = Served()
    impossible = served.add(0, prompt=10, new=50, e2e_slo_s=1e-3)
    requests = [served.add(index, prompt=10, new=20, e2e_slo_s=400.0) for index in (1, 2)]
    served.run()
    assert impossible.is_guaranteed is False and impossible.metrics().attained is False
    assert all(request.is_guaranteed and request.metrics().attained for request in requests)
