"""The memory of a drafter's K/V, lent to the target where plain decoding of more requests is faster."""

from __future__ import annotations

import pytest

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.scheduling.continuous import Limits
from hf_slospec.engine.scheduling.kv_room import KVRoom
from tests.engine.scheduling.test_continuous import Served
from tests.support.hasty_room import HastyRoom
from tests.support.toy_models import NowAndThen, WholeTrees


def test_a_loan_ends_once_its_slots_are_free_and_nothing_waits() -> None:
    room = KVRoom(100, 70)
    assert room.may_lend and (room.lent, room.slots) == (0, 100)
    room.lend()
    assert not room.may_lend and (room.lent, room.slots) == (70, 170)
    for held, is_enough in ((150, True), (100, False)):
        room.settle(held, is_enough)
        assert room.lent == 70
    room.settle(100, is_enough=True)
    assert (room.lent, room.slots, room.may_lend) == (0, 100, False)
    for _ in range(KVRoom.GAP):
        room.settle(100, is_enough=False)
    assert room.may_lend


def test_a_recalled_loan_takes_no_more_requests_and_is_not_soon_given_again() -> None:
    room = HastyRoom(100, 70)
    for patience in (4, 8, 16):
        room.lend()
        room.recall()
        assert (room.slots, room.lent) == (100, 70)
        room.settle(101, is_enough=False)
        assert room.lent
        room.settle(100, is_enough=False)
        assert not room.lent
        num_steps = 0
        while not room.may_lend:
            room.settle(100, is_enough=False)
            num_steps += 1
        assert num_steps == patience


def test_nothing_is_lent_while_memory_is_short_or_where_there_is_none() -> None:
    room = KVRoom(100, 70)
    room.tighten(60)
    assert not room.may_lend and room.slots == 60
    room.relax()
    assert room.may_lend and room.slots == 100
    assert not KVRoom(100).may_lend


def served(draft_slots: int, policy: object = None, own_slots: int = 220) -> Served:
    found = Served(Limits(8, own_slots, 2, 64, 1e9, draft_slots), policy=policy)
    found.scheduler.room = HastyRoom(own_slots, draft_slots)
    return found


@pytest.mark.parametrize("draft_slots", [0, 40])
def test_more_requests_run_together_where_nothing_is_drafted(draft_slots: int) -> None:
    own = served(draft_slots)
    requests = [own.add(0, prompt=10, new=190), *(own.add(index, prompt=10, new=10) for index in range(1, 9))]
    most = 0
    while own.scheduler.running or own.scheduler.waiting:
        own.step()
        most = max(most, own.scheduler.kv_held)
        assert own.scheduler.kv_held <= 220 + own.scheduler.lent_slots
    assert most == 220 + draft_slots
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.parametrize(("tpot_slo_s", "is_lent"), [(None, True), (1e3, True), (1e-3, False)])
def test_requests_whose_slo_plain_steps_would_miss_keep_the_drafter(tpot_slo_s: float | None, is_lent: bool) -> None:
    own = served(100)
    own.add(0, prompt=10, new=190, tpot_slo_s=tpot_slo_s)
    for index in range(1, 6):
        own.add(index, prompt=10, new=10)
    lent = 0
    while own.scheduler.running or own.scheduler.waiting:
        own.step()
        lent = max(lent, own.scheduler.lent_slots)
    assert bool(lent) == is_lent


def test_drafts_that_pay_keep_their_memory() -> None:
    own = served(40, WholeTrees(Plan(2, 1)))
    own.scheduler.costs.verify = ForwardCost(LatencyCurve((1, 2, 64), (1.0, 1.9, 60.0)))  # of the drafter's K/V, little
    for index in range(9):
        own.add(index, prompt=10, new=60)
    while own.scheduler.running or own.scheduler.waiting:
        own.step()
        assert not own.scheduler.lent_slots


def test_a_loan_is_recalled_where_steps_turn_out_slower_than_expected() -> None:
    own = served(200)
    for index in range(40):
        own.add(index, prompt=10, new=60)
    while not own.scheduler.lent_slots:
        own.step()
    own.scheduler.costs.verify = ForwardCost(LatencyCurve((1, 64), (100.0, 6400.0)))
    own.step()
    assert own.scheduler.room.is_recalled and own.scheduler.room.slots == 220
    while own.scheduler.lent_slots:
        own.step()
    assert own.scheduler.kv_held <= 220 and own.scheduler.waiting
    own.run()


def test_nothing_is_drafted_while_the_drafters_memory_is_lent() -> None:
    own = served(40, NowAndThen(Plan(2, 1)), own_slots=60)
    relieved = list[int]()
    own.drafter.relieve = lambda: relieved.append(own.scheduler.lent_slots) or True
    for index in range(12):
        own.add(index, prompt=8, new=20)
    num_lent = num_drafted = 0
    while own.scheduler.running or own.scheduler.waiting:
        event = own.step()
        num_lent += own.scheduler.lent_slots > 0
        num_drafted += event.draft_levels > 0
        assert not (event.draft_levels and own.engine._lent_slots)
    assert num_lent and num_drafted
    assert relieved and all(slots == 40 for slots in relieved)  # once for each loan
