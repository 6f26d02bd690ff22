"""The router: replicas in the order of what they can guarantee, with what was sent since they reported."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hf_slospec.algo.latency_curves import LatencyCurve
from hf_slospec.algo.prefixes import PrefixIndex
from hf_slospec.algo.replica_ranking import Need, ReplicaLoad
from hf_slospec.engine.request import Progress
from hf_slospec.replicas.messages import Offer, ToReplica
from hf_slospec.replicas.router import GuaranteeRouter, SentOffers
from hf_slospec.serving.openai.engine import Order

IDLE = ReplicaLoad(kv_free=10_000, step_s=LatencyCurve((1, 64), (0.01, 0.05)))
PROMPT = list(range(200))


def offer(number: int = 0, prompt: list[int] = PROMPT, slo_s: float = 0.1, **fields: Any) -> Offer:
    return Offer(Order(prompt), Need(len(prompt), 500, slo_s), Progress([]), "front", number, **fields)


class Router(GuaranteeRouter):
    """The router without Serve around it."""

    def __init__(self) -> None:
        self._sent, self._prefixes, self._running, self._reports = SentOffers(), PrefixIndex(), [], {}


def replica(name: str, load: ReplicaLoad = IDLE, seen: int = -1) -> Any:
    report = {"load": TypeAdapter(ReplicaLoad).dump_python(load), "seen": {"front": seen}}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=report)


def call(name: str, *arguments: Any) -> Any:
    context = SimpleNamespace(should_backoff=False)
    metadata = SimpleNamespace(internal_request_id=name)
    return SimpleNamespace(args=list(arguments), metadata=metadata, routing_context=context)


def order(router: Router, replicas: list[Any], pending: Any) -> list[str]:
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert all(len(rank) == 1 for rank in ranks), "within a rank Serve would take the shortest queue"
    return [rank[0].replica_id.unique_id for rank in ranks]


def test_burst_without_slos_is_spread_although_no_replica_has_reported_since() -> None:
    router, replicas = Router(), [replica(name) for name in "abc"]
    chosen = [order(router, replicas, call(f"c{index}", offer(index, slo_s=math.inf)))[0] for index in range(9)]
    assert sorted(chosen) == ["a", "a", "a", "b", "b", "b", "c", "c", "c"]


def test_completed_calls_and_those_in_a_report_count_once() -> None:
    router = Router()
    for index in range(4):
        order(router, [replica("a")], call(f"c{index}", offer(index)))
    assert router._load("a", replica("a").routing_stats).num_requests == 4
    assert router._load("a", replica("a", seen=1).routing_stats).num_requests == 2
    router.on_request_completed(SimpleNamespace(unique_id="a"), "c3")
    assert router._load("a", replica("a", seen=1).routing_stats).num_requests == 1


def test_call_is_counted_where_it_went() -> None:
    router = Router()
    pending = call("c", offer())
    first, second = order(router, [replica("a"), replica("b")], pending)
    router.on_request_routed(pending, SimpleNamespace(unique_id=second), None)
    counts = {name: router._load(name, replica(name).routing_stats).num_requests for name in "ab"}
    assert counts == {first: 0, second: 1}


def test_replicas_that_declined_are_left_out_and_all_are_asked_again_at_last() -> None:
    router, replicas = Router(), [replica(name) for name in "abc"]
    declined = frozenset("a")
    assert set(order(router, replicas, call("c", offer(declined=declined, must_guarantee=True)))) == {"b", "c"}
    assert set(order(router, replicas[:1], call("c", offer(declined=declined, must_guarantee=True)))) == {"a"}
    assert set(order(router, replicas, call("c", offer(failed=declined)))) == {"b", "c"}
    assert order(router, replicas[:1], call("c", offer(failed=declined))) == ["a"]  # no other is left
    busy = ReplicaLoad(best_effort=3, kv_free=10, step_s=IDLE.step_s)
    final = offer(declined=frozenset("abc"))
    assert order(router, [replica("a", busy), replica("b"), replica("c", busy)], call("c", final))[0] == "b"


def test_equal_replicas_are_told_apart_by_what_they_know_of_the_prompt() -> None:
    router, replicas = Router(), [replica(name) for name in "abc"]
    pending = call("c", offer(must_guarantee=True))
    router.on_request_routed(pending, SimpleNamespace(unique_id="b"), None)
    router.on_request_completed(SimpleNamespace(unique_id="b"), "c")
    assert order(router, replicas, call("d", offer(1, must_guarantee=True)))[0] == "b"
    router.on_request_completed(SimpleNamespace(unique_id="b"), "d")
    assert order(router, replicas, call("e", offer(2, [*range(500, 700)], must_guarantee=True)))[0] != "b"


def test_chats_without_slos_return_to_their_replica_unless_it_is_busier() -> None:
    router, replicas = Router(), [replica(name) for name in "abc"]
    router.on_request_routed(call("c", offer(slo_s=math.inf)), SimpleNamespace(unique_id="b"), None)
    router.on_request_completed(SimpleNamespace(unique_id="b"), "c")
    chosen = [order(router, replicas, call(f"d{index}", offer(index, slo_s=math.inf)))[0] for index in range(4)]
    assert chosen == ["b", "b", "a", "c"]


def test_call_to_one_replica_goes_there_or_waits() -> None:
    router, replicas = Router(), [replica(name) for name in "ab"]
    pending = call("c", ToReplica("b"))
    assert order(router, replicas, pending) == ["b"] and pending.routing_context.should_backoff
    assert order(router, replicas, call("c", ToReplica("gone"))) == []
    assert len(order(router, replicas, call("c"))) == 2


def test_replica_that_has_not_reported_is_idle() -> None:
    silent = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats={})
    assert order(Router(), [silent], call("c", offer(must_guarantee=True))) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_counts_are_those_of_calls_under_way(acts: list[tuple[str, str, bool]]) -> None:
    sent, under_way = SentOffers(), dict[str, str]()
    for number, (name, where, begins) in enumerate(acts):
        if begins:
            sent.add(name, where, offer(number))
            under_way[name] = where
        else:
            sent.remove(name)
            under_way.pop(name, None)
    for where in "ab":
        assert sent.on(where, ReplicaLoad(), {}).num_requests == list(under_way.values()).count(where)
    sent.keep(["a"])
    assert sent.on("b", ReplicaLoad(), {}).num_requests == 0
    assert sent.on("a", ReplicaLoad(), {}).num_requests == list(under_way.values()).count("a")


def test_conversation_that_comes_back_goes_to_the_replica_that_has_its_kv() -> None:
    router, replicas = Router(), [replica(name) for name in "abc"]
    router.on_request_routed(call("c0", offer()), SimpleNamespace(unique_id="b"), None)
    router.on_request_completed(SimpleNamespace(unique_id="b"), "c0")
    longer = [*PROMPT, *range(900, 1000)]
    assert order(router, replicas, call("c1", offer(1, longer)))[0] == "b"
    salted = replace(offer(2, longer), order=Order(longer, {"cache_salt": "another client"}))
    assert order(router, replicas, call("c2", salted))[0] != "b"  # where the call before it is under way
    assert order(router, replicas, call("c3", offer(3, longer, failed=["b"])))[0] != "b"  # its text is prefilled again


def test_replicas_have_two_names() -> None:
    from hf_slospec import replicas
    from hf_slospec.serving import replicas as public

    assert {name: getattr(public, name) for name in public.__all__} == {
        name: getattr(replicas, name) for name in replicas.__all__
    }
