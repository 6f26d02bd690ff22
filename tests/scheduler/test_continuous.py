"""Continuous batching on the toy model and a virtual clock: exact output, limits kept, order of
requests.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.batch_formation import AHEAD, MAX_SKIPPED, MIN_CHUNK
from hf_slospec.scheduler.continuous import MAX_PREEMPTED, ContinuousScheduler, Limits
from hf_slospec.scheduler.guarantees import tightest_tpot_slo_s
from tests.support.breadth import quick_or
from tests.support.toys.engine import commit
from tests.support.toys.models import new_costs, sampled
from tests.support.toys.served import Served
from tests.support.toys.trees import SEEDS


def test_steps_in_which_drafting_is_paused_teach_nothing_of_drafts():
    config = SLOSpecConfig(max_depth=3, max_width=2)
    history = SpeculationHistory(config)
    served = Served(policy=new_policy(config, new_costs(), history))
    for index in range(4):
        served.add(index, new=60)
    served.step(6)
    known = history.depths.mass.copy()
    number = history.depths.num_observed
    assert number and known[1:].any()
    served.engine._num_paused = 8
    for _ in range(8):
        assert not served.step().draft_levels
    assert (history.depths.mass == known).all() and history.depths.num_observed == number
    served.run()
    assert history.depths.num_observed > number


def test_requests_make_room_for_first_tokens_only_so_often_in_a_row():
    served = Served()
    decoding = [served.add(index, new=400) for index in range(4)]
    served.step(8)
    costs = served.scheduler.costs
    num_skipped = 0
    for index in range(MAX_SKIPPED + 1):
        num_keys = sum(len(request.tokens) for request in decoding)
        ttft_slo_s = (costs.verify_s(3) + costs.verify_s(7, 4, num_keys)) / 2
        served.add(10 + index, new=1, ttft_slo_s=ttft_slo_s)
        num_skipped += not served.step().num_decoding
    assert num_skipped == MAX_SKIPPED  # not in the last of these steps


def test_only_requests_that_arrive_while_others_decode_tell_which_steps_are_too_long():
    served = Served()
    served.add(0, ttft_slo_s=9.0)
    served.run()
    served.add(1, new=20)
    served.step()
    assert not served.scheduler.costs.first_tokens.is_expected
    decoding = served.step()
    assert decoding.num_decoding
    served.clock.now_s = (
        decoding.begun_s
    )  # the toy's clock goes on after the step, so this is its end as well
    served.add(2, ttft_slo_s=9.0)
    assert served.scheduler.costs.first_tokens.is_expected
    served.run()
    assert not served.scheduler.costs.for_own_engine().first_tokens.is_expected


def test_a_step_has_to_end_in_time_for_the_first_token_of_a_stage():
    costs = new_costs()
    scheduler = ContinuousScheduler(Limits(4, 1000, 6, 8, 1e9), costs, "edf")
    request = Request(0, RequestParams([0], 40, (Stage(9.0, 1), Stage(9.0, ttft_slo_s=2.0))))
    commit(request, [1], 0.0)
    costs.recent.tokens = 4.0  # they come together, so no earlier
    assert scheduler.batches._due_s(request, 0.5, 1.0) == pytest.approx(AHEAD * 2.0 - 0.5)
    commit(request, [1], 1.0)
    assert scheduler.batches._due_s(request, 1.0, 1.0) == pytest.approx(AHEAD * 9.0 * 4.0)
    assert (
        tightest_tpot_slo_s(request) == 2.0
    )  # admission plans with it, since it is one of a decode step


@pytest.mark.parametrize(
    ("admission", "tpot_slo_s", "can_wait"),
    [("slo", 1e3, True), ("slo", None, True), ("slo", 2.0, False), ("fcfs", 1e3, False)],
)
@pytest.mark.parametrize("place", [0.9, 1.5, 3.0], ids=["lost", "in time alone", "in time anyway"])
def test_requests_that_can_wait_make_room_for_a_first_token(admission, tpot_slo_s, can_wait, place):
    served = Served(admission)
    decoding = [served.add(index, new=60, tpot_slo_s=tpot_slo_s) for index in range(4)]
    served.step(8)
    costs = served.scheduler.costs
    now_s = served.clock.now_s
    alone_s, step_s = (
        costs.verify_s(3),
        costs.verify_s(7, 4, sum(len(request.tokens) for request in decoding)),
    )
    assert alone_s < step_s
    hurried = served.add(9, ttft_slo_s=alone_s + (place - 1.0) * (step_s - alone_s))
    served.scheduler.enter(now_s)
    schedule = served.scheduler.schedule(now_s)
    assert schedule.finishing_prefill == [hurried]
    assert len(schedule.decoding) == (0 if can_wait and place == 1.5 else 4)
    if place == 3.0:  # the policy may draft as much as leaves time
        assert costs.first_tokens.is_due


@given(
    seed=SEEDS,
    num_requests=st.integers(1, 8),
    admission=st.sampled_from(["slo", "edf", "fcfs"]),
    policy_name=st.sampled_from(["auto", "adaserve", "none"]),
    max_batch=st.integers(1, 4),
    kv_tokens=st.integers(60, 200),
    prefill_chunk=st.integers(1, 12),
    starvation_s=st.sampled_from([0.5, 20.0, 1e9]),
    is_sampled=st.booleans(),
)
@settings(deadline=None, max_examples=quick_or(20, 60))
def test_every_request_gets_what_plain_decoding_gives_within_limits(
    seed,
    num_requests,
    admission,
    policy_name,
    max_batch,
    kv_tokens,
    prefill_chunk,
    starvation_s,
    is_sampled,
):
    rng = np.random.default_rng(seed)
    config = SLOSpecConfig(policy=policy_name, max_depth=3, max_width=2)
    policy = new_policy(config, new_costs(), SpeculationHistory(config))
    served = Served(
        admission,
        policy,
        seed,
        max_batch=max_batch,
        kv_tokens=kv_tokens,
        max_nodes=6,
        prefill_chunk=prefill_chunk,
        starvation_s=starvation_s,
    )
    served.scheduler.output_tokens = rng.choice([0.0, 4.0, 100.0])
    if is_sampled:
        served.toy.choose = sampled(served.target_model, seed)
    requests = list[Request]()
    while len(requests) < num_requests or served.scheduler.running or served.scheduler.waiting:
        if len(requests) < num_requests and (rng.random() < 0.4 or not served.scheduler.running):
            fields = dict(
                tpot_slo_s=rng.choice([None, 0.5, 3.0]),
                ttft_slo_s=rng.choice([None, 4.0, 50.0]),
                e2e_slo_s=rng.choice([None, None, 8.0, 90.0]),
                priority=int(rng.integers(2)),
                is_best_effort=bool(rng.random() < 0.3),
            )
            requests.append(
                served.add(
                    len(requests), int(rng.integers(2, 30)), int(rng.integers(1, 16)), **fields
                )
            )
        running = served.scheduler.running
        served.step()
        assert len(running) <= max_batch
        assert served.scheduler.kv_held <= kv_tokens
        assert served.events[-1].prefill_tokens <= prefill_chunk
        assert len(served.events) < 5000
    assert not served.toy.cached, "K/V was left behind"
    for request in requests:
        alone = Request(request.index, request.params)
        while not alone.emit(served.toy.choose(alone)):
            pass
        assert request.tokens == alone.tokens
        assert request.finish_reason == "length"


def test_a_long_prompt_is_prefilled_beside_decoding_requests_and_stalls_none():
    served = Served(prefill_chunk=512)
    short = [served.add(index, prompt=3, new=60) for index in range(3)]
    while not all(request.is_decoding for request in short):
        served.step()
    plain_s = served.clock.now_s
    served.step()
    plain_s = served.clock.now_s - plain_s
    long = served.add(9, prompt=400, new=2)
    longest_s = 0.0
    while not long.num_emitted:
        before_s = served.clock.now_s
        emitted = [request.num_emitted for request in short]
        event = served.step()
        longest_s = max(longest_s, served.clock.now_s - before_s)
        assert all(
            r.is_finished or r.num_emitted > old for r, old in zip(short, emitted, strict=True)
        )
        assert not event.is_prefill or all(request.is_finished for request in short)
    assert longest_s <= 3.0 * plain_s + 1e-9 or all(request.is_finished for request in short)


def test_a_prompt_alone_is_prefilled_in_chunks_of_the_limit():
    served = Served(prefill_chunk=50)
    served.add(prompt=120, new=1)
    served.run()
    assert [event.prefill_tokens for event in served.events] == [50, 50, 20]


def test_earliest_deadlines_first_or_in_order_of_arrival():
    for admission, expected in (("edf", [1, 2, 0]), ("fcfs", [0, 1, 2])):
        served = Served(admission, max_batch=1)
        for index, ttft_s in enumerate((90.0, 30.0, 60.0)):
            served.add(index, ttft_slo_s=ttft_s)
        served.run()
        assert [event.requests[0].index for event in served.events if event.is_prefill] == expected


def test_lower_priority_goes_first():
    served = Served(max_batch=1)
    for index, priority in enumerate((0, -5, -1)):
        served.add(index, priority=priority)
    served.run()
    assert [event.requests[0].index for event in served.events if event.is_prefill] == [1, 2, 0]


@pytest.mark.parametrize(("admission", "tpot_slo_s"), [("slo", None), ("edf", 40.0)])
def test_requests_that_can_wait_are_skipped_for_late_ones_at_most_max_skipped_times(
    admission, tpot_slo_s
):
    """Best-effort requests can wait, and guaranteed ones that are far ahead of their SLOs."""
    served = Served(admission, max_batch=64, prefill_chunk=64)
    spare = [served.add(index, new=200, tpot_slo_s=tpot_slo_s) for index in range(1, 30)]
    served.step(5)
    tight = served.add(
        0, new=100, tpot_slo_s=1.5, ttft_slo_s=100.0
    )  # a step of one takes 1.0, of thirty 3
    sits = 0
    in_a_row = dict.fromkeys((request.index for request in spare), 0)
    while not tight.is_finished:
        event = served.step()
        if not event.is_prefill and tight.num_emitted > 1:
            sits += len(event.requests) < 30
            taking_part = {step.index for step in event.requests}
            in_a_row = {
                index: 0 if index in taking_part else count + 1 for index, count in in_a_row.items()
            }
            assert max(in_a_row.values()) <= MAX_SKIPPED
    assert sits > 50
    assert tight.metrics().attained
    assert tpot_slo_s is None or all(request.is_guaranteed for request in spare)
    served.run()
    assert tpot_slo_s is None or all(request.metrics().attained for request in spare)


def test_guaranteed_requests_that_can_no_longer_keep_their_slo_wait_for_those_that_can():
    served = Served("edf", max_batch=64, prefill_chunk=64)
    lost = [served.add(index, new=200, tpot_slo_s=0.5) for index in range(1, 30)]  # a step takes 1
    served.step(5)
    tight = served.add(0, new=100, tpot_slo_s=1.5, ttft_slo_s=100.0)
    served.run()
    assert tight.metrics().attained
    assert all(request.is_guaranteed and not request.metrics().attained for request in lost)


def test_work_shrinks_after_out_of_memory_and_recovers():
    served = Served(prefill_chunk=64)
    requests = [served.add(index, new=30, is_best_effort=True) for index in range(6)]
    served.step(4)
    gone = served.scheduler.relieve(served.clock.now_s)
    served.engine.forget(gone)
    assert len(gone) == 3
    served.step()
    assert len(served.scheduler.running) == 3  # nobody takes the room at once
    assert served.scheduler.shrink()
    assert len(served.step().requests) == 2
    served.run()
    assert all(request.finish_reason == "length" for request in requests)
    assert len([event for event in served.events if len(event.requests) == 6]) >= 1


def test_shrinking_ends_at_one_request():
    served = Served(prefill_chunk=4)
    served.add(0, new=30)
    served.step(3)
    shrinks = 0
    while served.scheduler.shrink():
        shrinks += 1
        assert shrinks < 20
    assert served.scheduler.relieve(served.clock.now_s) == []  # the last one is not sent away
    assert served.scheduler.batches._share >= 1 / 8  # soon forgotten once memory suffices


@pytest.mark.parametrize("prompt", [2, MIN_CHUNK, 100])
def test_cancelled_requests_leave_nothing_behind(prompt):
    served = Served(max_batch=2)
    requests = [served.add(index, prompt=prompt, new=20, tpot_slo_s=1e3) for index in range(4)]
    served.step(3)
    for request in requests[1:]:
        request.end(None)
        served.engine.retire([request])
    served.run()
    assert not served.toy.cached
    assert requests[0].finish_reason == "length"
    assert {request.finish_reason for request in requests[1:]} == {"cancelled"}


def test_requests_leave_room_for_as_many_nodes_as_steps_verify():
    """Two texts of 10 tokens fit into 25 slots with up to two nodes each, roots not counted."""
    for nodes, num_running in ((1.0, 2), (3.0, 2), (3.5, 1), (100.0, 1)):
        served = Served(kv_tokens=25, prefill_chunk=64)
        served.scheduler.costs.recent.nodes = nodes
        for index in range(2):
            served.add(index, 6, 4)
        served.scheduler.enter(0.0)
        assert len(served.scheduler.running) == num_running


@pytest.mark.parametrize(("tpot_slo_s", "most_guaranteed"), [(None, 0), (1e3, 2)])
def test_only_guaranteed_requests_hold_slots_at_their_maximum_lengths(tpot_slo_s, most_guaranteed):
    """1,000 slots for requests that may emit 400 tokens and emit 20."""
    served = Served(kv_tokens=1000, prefill_chunk=64)
    ends = dict(is_stop=lambda tokens: len(tokens) == 30, tpot_slo_s=tpot_slo_s)
    requests = [served.add(index, prompt=10, new=400, **ends) for index in range(30)]
    running = list[list[Request]]()
    while served.scheduler.running or served.scheduler.waiting:
        served.step()
        running.append(list(served.scheduler.running))
    assert max(map(len, running)) == (8 if tpot_slo_s is None else 6)
    assert (
        max(sum(bool(request.is_guaranteed) for request in own) for own in running)
        == most_guaranteed
    )
    assert all(
        request.finish_reason == "stop" and not request.stats.num_preempted for request in requests
    )
    assert served.scheduler.output_tokens < 30  # it begins with 100


def test_where_slots_run_out_the_last_to_arrive_are_preempted_and_guaranteed_requests_are_not():
    served = Served(kv_tokens=300, prefill_chunk=64)
    served.scheduler.output_tokens = 10.0
    guaranteed = [served.add(index, prompt=10, new=60, tpot_slo_s=1e3) for index in range(2)]
    others = [served.add(index, prompt=10, new=90) for index in range(2, 8)]
    served.step()
    assert len(served.scheduler.running) == 8 and all(
        request.is_guaranteed for request in guaranteed
    )
    while not any(request.stats.num_preempted for request in others):
        served.step()
        assert sum(len(request.tokens) for request in served.scheduler.running) <= 300
    assert [request.stats.num_preempted for request in others] == [0, 0, 0, 0, 0, 1]
    served.run()
    assert all(request.finish_reason == "length" for request in [*guaranteed, *others])
    assert not any(request.stats.num_preempted for request in guaranteed)
    assert not served.toy.cached


def test_a_request_is_expected_to_emit_twice_as_much_each_time_it_was_preempted():
    served = Served(kv_tokens=300, prefill_chunk=64)
    served.scheduler.output_tokens = 20.0
    request = served.add(0, prompt=10, new=200)
    served.step()
    nodes = served.scheduler._num_nodes
    slots = []
    for request.stats.num_preempted in (0, 1, 2, 3, 4, 10_000):
        slots.append(served.scheduler._expected([request]) - nodes)
    assert slots == [11 + 20, 11 + 40, 11 + 80, 11 + 160, 210, 210]
    served.scheduler.output_tokens = 1.0
    request.stats.num_preempted = 0
    assert served.scheduler._expected([request]) - nodes == 11 + 4  # a step may emit that much


def test_a_request_preempted_often_enters_beside_others():
    """It may emit as much as there are slots, and emits little."""
    served = Served(kv_tokens=300, prefill_chunk=64)
    served.scheduler.output_tokens = 10.0
    often = served.add(0, prompt=10, new=280, is_stop=lambda tokens: len(tokens) == 40)
    often.stats.num_preempted = MAX_PREEMPTED
    others = [
        served.add(index, prompt=10, new=280, is_stop=lambda tokens: len(tokens) == 30)
        for index in range(1, 9)
    ]
    served.step()
    assert often in served.scheduler.running and len(served.scheduler.running) > 4
    served.run()
    assert all(request.finish_reason == "stop" for request in [often, *others])


def test_a_running_request_that_is_guaranteed_late_gets_its_slots_at_once(monkeypatch):
    served = Served(max_batch=16, kv_tokens=300, prefill_chunk=64)
    scheduler = served.scheduler
    enter = served.scheduler.enter
    preempted = list[int]()
    scheduler.output_tokens = 5.0
    for index in range(6):
        served.add(index, prompt=4, new=8, tpot_slo_s=1.4)
    served.step()
    late = served.add(6, prompt=4, new=200, tpot_slo_s=1.4)
    served.step()
    assert late in scheduler.running and not late.is_guaranteed
    for index in range(7, 23):
        served.add(index, prompt=10, new=200)

    def entering(now_s):
        before = late.is_guaranteed
        victims = enter(now_s)
        assert scheduler._after_step(scheduler.running) <= scheduler.limits.kv_tokens
        if late.is_guaranteed and not before:
            preempted.append(len(victims))
        return victims

    monkeypatch.setattr(scheduler, "enter", entering)
    served.run()
    assert preempted and preempted[0] > 0
