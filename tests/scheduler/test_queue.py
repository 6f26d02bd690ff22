"""The queue of waiting requests: the decisions of plain lists, at a cost that does not depend on
its length.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given, settings

from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from hf_slospec.scheduler.load import load_of
from hf_slospec.scheduler.queue import SLACK, RequestHeap
from tests.support.breadth import quick_or
from tests.support.oracles.plain_scheduler import PlainScheduler, plain_load_of
from tests.support.toys.models import new_costs
from tests.support.toys.trees import SEEDS


def history(kind, seed):
    """What a scheduler decides while requests come, decode, end, are cancelled and run out of
    memory.
    """
    rng = random.Random(seed)
    starvation_s = rng.choice([0.0, 5.0, 1e9])
    limits = Limits(
        rng.randrange(1, 5), rng.randrange(60, 250), 6, rng.randrange(1, 40), starvation_s
    )
    admission = rng.choice(["slo", "slo", "slo", "edf", "fcfs", "priority"])
    scheduler = kind(limits, new_costs(), admission, num_reusable=lambda request: request.index % 7)
    now_s = 0.0
    decided = list[object]()
    requests = list[Request]()
    for _ in range(rng.randrange(5, 40)):
        now_s += rng.choice([0.0, 0.5, 2.0, 30.0])
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            params = RequestParams(
                [1] * rng.randrange(1, 25), rng.randrange(1, 12),
                (Stage(rng.choice([None, None, 1e-9, 0.3, 1.5, 3.0])),),
                rng.choice([None, 1.0, 6.0, 40.0]), rng.randrange(2), is_best_effort=rng.random() < 0.2,
            )  # fmt: skip
            new = Request(len(requests), params, now_s - rng.choice([0.0, 1.0]))
            requests.append(new)
            if rng.random() < 0.2:
                decided.append(scheduler.offer(new, now_s))
            else:
                scheduler.add(new)
        event = rng.random()
        if event < 0.1 and scheduler.running:
            relieved = scheduler.relieve(now_s)
            for request in relieved:
                request.kv.num_cached = 0
            decided.append([request.index for request in relieved])
        elif event < 0.3 and (
            present := sorted([*scheduler.running, *scheduler.waiting], key=lambda r: r.index)
        ):
            gone = rng.choice(present)
            gone.end(None)
            scheduler.remove(gone)
        preempted = scheduler.enter(now_s)
        for request in preempted:
            request.kv.num_cached = 0
        schedule = scheduler.schedule(now_s)
        for chunk in schedule.chunks:
            chunk.request.kv.num_cached += chunk.num_tokens - chunk.is_last
        for request in schedule.choosing:
            request.emit(1)
            request.kv.num_cached = len(request.tokens) - 1
            if request.is_finished:
                scheduler.remove(request)
        if kind is ContinuousScheduler:
            load = load_of(scheduler)
            assert load == plain_load_of(scheduler, load)
        decided.append(
            (
                [request.index for request in preempted],
                [request.index for request in scheduler.running],
                sorted(request.index for request in scheduler.waiting),
                [request.index for request in requests if request.is_guaranteed],
                [request.index for request in schedule.decoding],
                [(chunk.request.index, chunk.num_tokens) for chunk in schedule.chunks],
            )
        )
    return decided


@given(seed=SEEDS)
@settings(deadline=None, max_examples=quick_or(33, 100))
def test_the_queue_decides_as_plain_lists_do(seed):
    assert history(ContinuousScheduler, seed) == history(PlainScheduler, seed)


class WatchedRequest(Request):
    """Counts how often anything of it is read, itself and all others of its kind."""

    reads: ClassVar = Counter[int]()

    def __getattribute__(self, name):
        index = object.__getattribute__(self, "__dict__").get("index", -1)
        WatchedRequest.reads[index] += 1
        return super().__getattribute__(name)


def reads_of_a_turn(num_waiting, admission, running_slo):
    """How often a turn and its report read waiting requests, and how many, once the queue has been
    looked at.
    """
    scheduler = ContinuousScheduler(Limits(4, 10**9, 6, 64, 1e6), new_costs(), admission)
    for index in range(4):
        scheduler.add(
            Request(index, RequestParams([1, 2], 10**6, (Stage(running_slo),), ttft_slo_s=1e5))
        )
    scheduler.enter(0.0)
    for request in scheduler.running:
        request.emit(1)
        request.kv.num_cached = 2
    for index in range(4, num_waiting + 4):
        slo_s = (None, 1e-9, 2.0, 50.0)[index % 4]
        ttft_slo_s = (None, 1e4, 2e4)[index % 3]
        scheduler.add(
            Request(
                index,
                RequestParams(
                    [1, 2], 5, (Stage(slo_s),), ttft_slo_s=ttft_slo_s, priority=index % 3
                ),
            )
        )
    scheduler.enter(1.0)
    for request in scheduler.waiting:
        request.__class__ = WatchedRequest
    cancelled = [
        request for place, request in enumerate(scheduler.waiting) if place in (10, 500, 700)
    ]
    WatchedRequest.reads.clear()
    for turn in range(3):  # each lets one request go and another one in, and cancels one
        load_of(scheduler)
        scheduler.add(
            WatchedRequest(10**7 + turn, RequestParams([1, 2], 5, (Stage(2.0),), ttft_slo_s=1e5))
        )
        scheduler.remove(scheduler.running[0])
        cancelled[turn].end(None)
        scheduler.remove(cancelled[turn])
        scheduler.enter(2.0 + turn)
        scheduler.schedule(2.0 + turn)
    return WatchedRequest.reads.total(), len(WatchedRequest.reads)


@pytest.mark.parametrize(
    ("admission", "running_slo", "num_waiting"),
    [
        ("slo", 2.0, 8_000),
        ("slo", None, 8_000),
        ("edf", 2.0, 8_000),
        ("priority", 2.0, 8_000),
        pytest.param("slo", 2.0, 100_000, marks=pytest.mark.nightly),
    ],
)
def test_a_turn_costs_the_same_however_many_wait(admission, running_slo, num_waiting):
    few, many = (reads_of_a_turn(number, admission, running_slo) for number in (1_000, num_waiting))
    assert many == few
    assert many[1] < 80 and many[0] < 4000


def test_removed_requests_do_not_stay_in_memory():
    heap = RequestHeap()
    requests = [Request(index, RequestParams([1], 1)) for index in range(200)]
    for place, request in enumerate(requests):
        heap.put(request, (math.pi * place % 1.0,))
        heap.put(request, (math.e * place % 1.0,))
    for request in requests[5:]:
        heap.remove(request)
    assert len(heap) == 5
    assert len(heap._heap) <= 2 * 5 + SLACK
    found = list[float]()
    while (first := heap.first()) is not None:
        found.append(first[0][0])
        heap.remove(first[1])
    assert found == sorted(math.e * place % 1.0 for place in range(5))
