"""Routing: replicas in the order of what they can guarantee, with what was sent since they
reported.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.replicas.directory import ReplicaDirectory
from hf_slospec.replicas.messages import Offer, Report, ToReplica
from hf_slospec.replicas.router import AddressRouter
from hf_slospec.request.state import Progress
from hf_slospec.scheduler.load import Need, ReplicaLoad
from hf_slospec.server.engine import Order

IDLE = ReplicaLoad(kv_free=10_000, step_s=LatencyCurve((1, 64), (0.01, 0.05)))
PROMPT = list(range(200))


def offer(number=0, prompt=PROMPT, slo_s=0.1, **fields):
    return Offer(
        "", Order(prompt), Need(len(prompt), 500, slo_s), Progress([]), "front", number, **fields
    )


def directory_of(names="abc", **loads):
    made = ReplicaDirectory(lambda: list(names), 5.0)
    for name in names:
        made.hear(Report(name, loads.get(name, IDLE), {}), "front")
    return made


def send(directory, made, names="abc"):
    """Send an offer to the first replica in the directory's order."""
    name = directory.in_order(names, made)[0]
    directory.add_sent(replace(made, replica=name))
    return name


def take(directory, made, name):
    """Let a replica take an offer, and end its request."""
    directory.record_taken(name, made)
    directory.hear(Report(name, IDLE, {"front": made.number}), "front")


def test_burst_without_slos_is_spread_although_no_replica_has_reported_since():
    directory = directory_of()
    chosen = [send(directory, offer(index, slo_s=math.inf)) for index in range(9)]
    assert sorted(chosen) == ["a", "a", "a", "b", "b", "b", "c", "c", "c"]


def test_refused_offers_and_those_in_a_report_count_once():
    directory = directory_of("a")
    for index in range(4):
        send(directory, offer(index), "a")
    assert directory.load("a").num_requests == 4
    directory.hear(Report("a", IDLE, {"front": 1, "another": 3}), "front")
    assert directory.load("a").num_requests == 2
    directory.remove_sent(3)
    assert directory.load("a").num_requests == 1


def test_new_replica_gets_requests_before_its_first_report():
    busy = replace(IDLE, best_effort=3, guaranteed=((0.1, 2),), prefill_tokens=900)
    for slo_s in (math.inf, 0.1):
        directory = directory_of("ab", a=busy, b=busy)
        directory.running = lambda: ["a", "b", "new"]
        chosen = [
            send(directory, offer(index, slo_s=slo_s, must_guarantee=True), directory.alive())
            for index in range(9)
        ]
        assert chosen[0] == "new" and 3 <= chosen.count("new") < 9, chosen


def test_equal_replicas_are_told_apart_by_what_they_know_of_the_prompt():
    directory = directory_of()
    take(directory, offer(must_guarantee=True), "b")
    assert directory.in_order("abc", offer(1, must_guarantee=True))[0] == "b"
    assert directory.in_order("abc", offer(2, [*range(500, 700)], must_guarantee=True))[0] != "b"


def test_conversation_that_comes_back_goes_to_the_replica_that_has_its_kv():
    directory = directory_of()
    take(directory, offer(), "b")
    longer = [*PROMPT, *range(900, 1000)]
    assert send(directory, offer(1, longer)) == "b"
    salted = replace(offer(2, longer), order=Order(longer, {"cache_salt": "another client"}))
    assert send(directory, salted) != "b"  # where the call before it is under way


class Router(AddressRouter):
    """The router without Serve around it."""

    def __init__(self):
        self.lengths = {}
        cache = SimpleNamespace(
            update=lambda replica_id, length: self.lengths.update({replica_id.unique_id: length})
        )
        self._replica_queue_len_cache = cache


def order(router, names, *arguments):
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    context = SimpleNamespace(should_backoff=False)
    pending = SimpleNamespace(args=list(arguments), routing_context=context)
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert all(len(rank) == 1 for rank in ranks), (
        "within a rank Serve would take the shortest queue"
    )
    assert context.should_backoff
    return [rank[0].replica_id.unique_id for rank in ranks]


def test_call_goes_to_its_replica_without_a_question_about_its_queue():
    router = Router()
    assert order(router, "ab", ToReplica("b")) == ["b"]
    assert order(router, "ab", replace(offer(), replica="b")) == ["b"]
    assert router.lengths == {
        "a": 0,
        "b": 0,
    }  # what Serve would ask for, and a silent replica would not answer


def test_call_to_a_replica_that_has_just_died_goes_to_another():
    assert order(Router(), "ab", replace(offer(), replica="gone")) == ["a", "b"]
    assert order(Router(), "ab", None) == ["a", "b"]


def test_replicas_have_two_names():
    from hf_slospec import replicas
    from hf_slospec.serving import replicas as public

    assert {name: getattr(public, name) for name in public.__all__} == {
        name: getattr(replicas, name) for name in replicas.__all__
    }
