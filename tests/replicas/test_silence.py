"""Replicas that fall silent: what they served goes on elsewhere, and what they still send is
dropped.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_slospec import NotGuaranteedError
from hf_slospec.replicas.failover import MAX_FAULTS
from hf_slospec.server.engine import Order
from hf_slospec.server.reading import fault_of
from tests.support.breadth import quick_or
from tests.support.stand_ins.silent_replicas import STEP_S, World, run_jumping, stand_still

SILENT_S = 5.0
TICK_S = SILENT_S / 5


async def during(job, *acts):
    """Return a job's result; each act is called so many seconds after its begin."""
    loop = asyncio.get_running_loop()
    for after_s, act in acts:
        loop.call_later(after_s, act)
    return await job


def test_stream_of_a_silent_replica_goes_on_elsewhere():
    async def run():
        world = World(2)
        decoding, pause_s = await during(world.decoded(100), (2.0, world["r0"].reaches.clear))
        assert decoding.replica == "r1" and decoding.num_faults == 1
        assert SILENT_S <= pause_s <= SILENT_S + TICK_S
        first = world["r0"].offers
        second = world["r1"].offers
        assert len(first) == len(second) == 1 and second[0].progress.tokens == decoding.tokens[:19]

    run_jumping(run)


def test_what_a_silent_replica_still_sends_is_dropped():
    async def run():
        world = World(2)
        held = world["r0"].reaches
        decoding, _ = await during(world.decoded(300), (2.0, held.clear), (20.0, held.set))
        assert decoding.replica == "r1" and len(decoding.tokens) == 300
        assert (
            world.streams[0].is_left and 0 < world.streams[0].num_late < 5
        )  # then the replica is told to stop
        decoding, pause_s = await world.decoded(5)
        assert decoding.replica == "r0", "it reports again, and gets offers again"
        assert pause_s <= 2 * STEP_S

    run_jumping(run)


def test_client_that_leaves_a_silent_replica_frees_it_when_it_can_be_reached():
    async def run():
        world = World(1)
        decoding = await world.engine.submit(Order([1], {"max_new_tokens": 1000}))
        await anext(decoding.asteps())
        world["r0"].reaches.clear()
        await asyncio.sleep(7.0)
        decoding.cancel()
        assert world["r0"].running
        await asyncio.sleep(7.0)
        world["r0"].reaches.set()
        await asyncio.sleep(1.0)
        assert not world["r0"].running
        assert not any(world.engine.directory._left.values()), "it is told once"

    run_jumping(run)


def test_silent_replica_gets_no_offers_until_it_reports():
    async def run():
        world = World(3)
        await asyncio.sleep(1.0)
        world["r0"].reaches.clear()
        await asyncio.sleep(SILENT_S + TICK_S)
        decodings = await asyncio.gather(*(world.decoded(5) for _ in range(6)))
        assert {decoding.replica for decoding, _ in decodings} == {"r1", "r2"}
        assert all(pause_s <= 2 * STEP_S for _, pause_s in decodings)
        world["r0"].reaches.set()
        await asyncio.sleep(1.0)
        assert world.engine.directory.alive() == {"r0", "r1", "r2"}

    run_jumping(run)


@pytest.mark.parametrize("slo", [{}, {"slo_tpot": 1.0}])
def test_offer_that_is_not_answered_goes_to_the_next_replica(slo):
    """The replica lives: it computes a long step, after which it would answer."""

    async def run():
        world = World(2)
        world["r0"].answer_s = 60.0
        decoding, pause_s = await world.decoded(5, **slo)
        assert decoding.replica == "r1" and decoding.num_faults == 0
        assert SILENT_S <= pause_s <= SILENT_S + TICK_S
        assert "r0" in world.engine.directory.alive()

    run_jumping(run)


@pytest.mark.parametrize("begin_s", [2.0, 2.15, 2.35, 2.55])
def test_only_replica_keeps_its_stream_while_it_is_silent(begin_s):
    """Its reports end before its stream does, or after it."""

    async def run():
        world = World(1)
        held = world["r0"].reaches
        decoding, pause_s = await during(
            world.decoded(100), (begin_s, held.clear), (32.0, held.set)
        )
        assert len(world["r0"].offers) == 1 and decoding.num_faults == 0
        assert 29.0 < pause_s < 31.0
        await during(world.decoded(100), (2.0, held.clear), (15.0, held.set))

    run_jumping(run)


def test_request_waits_while_the_only_replica_is_silent():
    async def run():
        world = World(1)
        await asyncio.sleep(1.0)
        world["r0"].reaches.clear()
        await asyncio.sleep(2 * SILENT_S)
        _, pause_s = await during(world.decoded(5), (20.0, world["r0"].reaches.set))
        assert 20.0 <= pause_s <= 22.0

    run_jumping(run)


@pytest.mark.parametrize("number", [1, 2])
def test_stream_that_stands_still_although_its_replica_reports_is_replaced(number):
    async def run():
        world = World(number)

        def stick():
            world.streams[0].is_stuck = True

        decoding, pause_s = await during(world.decoded(100), (2.0, stick))
        assert decoding.num_faults == 1 and pause_s <= (3 - number) * (SILENT_S + TICK_S)
        assert decoding.replica == f"r{number - 1}"

    run_jumping(run)


def test_front_that_stands_still_takes_no_replica_for_silent():
    async def run():
        world = World(2)
        acts = [(2.0 + index, lambda: stand_still(60.0)) for index in range(5)]
        decoding, _ = await during(world.decoded(100), *acts)
        assert decoding.num_faults == 0 and world.engine.directory.alive() == {"r0", "r1"}

    run_jumping(run)


FAULTS = st.lists(
    st.tuples(
        st.floats(0.0, 20.0), st.integers(1, 2), st.sampled_from([1.0, 4.0, 7.0, 30.0, None]),
    ),
    max_size=MAX_FAULTS - 1,
)  # fmt: skip
REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(1, 150), st.booleans()), min_size=1, max_size=6
)


@given(FAULTS, REQUESTS, st.sampled_from(["guarantees", "sequential"]))
def test_nothing_is_lost_or_repeated_as_long_as_one_replica_lives(faults, requests, routing):
    async def run():
        world = World(3, routing=routing)
        loop = asyncio.get_running_loop()
        for begin_s, index, lasts_s in faults:
            replica = world[f"r{index}"]
            if lasts_s is None:
                loop.call_later(begin_s, replica.died.set)
            else:
                loop.call_later(begin_s, replica.reaches.clear)
                loop.call_later(begin_s + lasts_s, replica.reaches.set)

        async def request(begin_s, tokens, has_slo):
            await asyncio.sleep(begin_s)
            _, pause_s = await world.decoded(tokens, **({"slo_tpot": 1.0} if has_slo else {}))
            return float(pause_s)

        pauses = await asyncio.gather(*(request(*each) for each in requests))
        most = min(len(faults), quick_or(4, 4))
        assert max(pauses) <= 2 * STEP_S + most * (SILENT_S + TICK_S + 1.0)

    run_jumping(run)


def asked(world):
    """Return the names of the replicas in the order in which they were asked."""
    return [stream.replica.name for stream in world.streams]


def test_sequential_routing_asks_in_turn_and_the_last_one_keeps_the_request():
    async def run():
        world = World(3, routing="sequential", max_hops=1)
        for replica in world.replicas.values():
            replica.guarantees = False
        decoding, _ = await world.decoded(2, slo_tpot=1.0)
        assert asked(world) == ["r0", "r1", "r1"] and decoding.replica == "r1"
        await world.decoded(2, slo_tpot=1.0)
        assert asked(world)[3:] == ["r1", "r2", "r2"]
        world["r0"].guarantees = True
        await world.decoded(2, slo_tpot=1.0)
        assert asked(world)[6:] == ["r2", "r0"]
        await world.decoded(2)
        await world.decoded(2)
        assert asked(world)[8:] == ["r0", "r1"]

    run_jumping(run)


@pytest.mark.parametrize(("hops", "number"), [(None, 3), (0, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize("routing", ["guarantees", "sequential"])
def test_hops_are_limited(routing, hops, number):
    async def run():
        world = World(3, routing=routing, max_hops=hops)
        for replica in world.replicas.values():
            replica.guarantees = False
        await world.decoded(2, slo_tpot=1.0)
        assert [stream.replica.offers[0].must_guarantee for stream in world.streams[:number]] == [
            True
        ] * number
        assert len(world.streams) == number + 1 and len({*asked(world)[:number]}) == number

    run_jumping(run)


@pytest.mark.parametrize("number", [1, 3])
def test_requests_without_a_guarantee_are_declined_if_the_options_say_so(number):
    async def run():
        world = World(number, backup="decline")
        for replica in world.replicas.values():
            replica.guarantees = False
        with pytest.raises(
            NotGuaranteedError, match=f"none of {number} replicas can guarantee"
        ) as caught:
            await world.decoded(2, slo_tpot=1.0)
        fault = fault_of(caught.value)
        assert fault.status == 429 and len(world.streams) == number
        decoding, _ = await world.decoded(2)
        assert decoding.replica is not None
        world.replicas["r0"].guarantees = True
        decoding, _ = await world.decoded(60, slo_tpot=1.0)
        assert decoding.replica == "r0"

    run_jumping(run)
