"""The memory of a drafter's K/V, lent to the target where plain decoding of more requests is faster."""

from __future__ import annotations

import pytest

from hf_slospec.algo.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request, RequestParams
from hf_slospec.engine.scheduling.continuous import Limits
from hf_slospec.engine.scheduling.kv_room import KVRoom
from tests.support.toys.hasty_room import HastyRoom, hasten
from tests.support.toys.models import NowAndThen, WholeTrees, new_costs
from tests.support.toys.served import Served


def new_room(kind: type[KVRoom] = KVRoom, lendable: int = 70) -> KVRoom:
    return kind(100, lendable, 8, new_costs())


def lend(room: KVRoom) -> None:
    request = Request(0, RequestParams([1], 9))
    request.emit(1)
    request.kv.num_cached = 1
    room.consider([request], num_waiting=5)


def test_a_loan_ends_once_its_slots_are_free_and_nothing_waits() -> None:
    room = new_room()
    assert (room.lent, room.slots) == (0, 100)
    lend(room)
    assert not room.may_lend and (room.lent, room.slots) == (70, 170)
    for held, is_enough in ((150, True), (100, False)):
        room.settle(held, is_enough)
        assert room.lent == 70
    room.settle(100, is_enough=True)
    assert (room.lent, room.slots) == (0, 100)
    for _ in range(KVRoom.GAP):
        lend(room)
        assert not room.lent
        room.settle(100, is_enough=False)
    lend(room)
    assert room.lent


def test_a_recalled_loan_takes_no_more_requests_and_is_not_soon_given_again() -> None:
    room = new_room(HastyRoom)
    usual, slow = room.costs.verify, ForwardCost(LatencyCurve((1, 64), (100.0, 6400.0)))
    for patience in (4, 8, 16):
        lend(room)
        room.costs.verify = slow
        room.settle(101, is_enough=False)
        assert (room.slots, room.lent) == (100, 70)
        room.costs.verify = usual
        room.settle(100, is_enough=False)
        assert not room.lent
        num_steps = 0
        while not room.may_lend:
            room.settle(100, is_enough=False)
            num_steps += 1
        assert num_steps == patience


def test_nothing_is_lent_while_memory_is_short_or_where_there_is_none() -> None:
    room = new_room()
    room.tighten(60)
    lend(room)
    assert (room.lent, room.slots) == (0, 60)
    room.relax()
    lend(room)
    assert (room.lent, room.slots) == (70, 170)
    none = new_room(lendable=0)
    lend(none)
    assert not none.is_lent


def served(draft_slots: int, policy: object = None, own_slots: int = 220) -> Served:
    found = Served(Limits(8, own_slots, 2, 64, 1e9, draft_slots), policy=policy)
    hasten(found.scheduler)
    found.scheduler.output_tokens = 1e9  # requests are admitted at their maximum lengths
    return found


@pytest.mark.parametrize("draft_slots", [0, 40])
def test_more_requests_run_together_where_nothing_is_drafted(draft_slots: int) -> None:
    own = served(draft_slots)
    requests = [own.add(0, prompt=10, new=190), *(own.add(index, prompt=10, new=10) for index in range(1, 9))]
    most = 0
    while own.scheduler.running or own.scheduler.waiting:
        own.step()
        most = max(most, own.scheduler._expected(own.scheduler.running))
        assert own.scheduler._expected(own.scheduler.running) <= 220 + own.scheduler.lent_slots
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
    own.scheduler.costs.verify = ForwardCost(LatencyCurve((1, 2, 64), (1.0, 1.9, 60.0)))  # little for the drafter's K/V
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
    assert own.scheduler._expected(own.scheduler.running) <= 220 and own.scheduler.waiting
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
