"""The memory of a drafter that is not used, lent to the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.scheduling.continuous import Limits
from hf_slospec.engine.scheduling.kv_room import KVRoom
from tests.engine.scheduling.test_continuous import Served
from tests.support.hasty_room import HastyRoom
from tests.support.toy_models import NowAndThen

DRAFTS, PLAIN = SimpleNamespace(num_decoding=1, draft_levels=2), SimpleNamespace(num_decoding=1, draft_levels=0)


def lent(room: KVRoom) -> int:
    room.lend()
    return room.lent


def test_slots_are_lent_once_drafts_are_rare() -> None:
    room = KVRoom(100, 70)
    for step in range(1000):
        assert lent(room) == 0
        room.observe(PLAIN if step % 8 else DRAFTS)
    num_steps = 0
    while not lent(room):
        room.observe(PLAIN)
        num_steps += 1
    assert 20 < num_steps < 60
    assert (room.lent, room.slots) == (70, 170)


def test_looks_now_and_then_do_not_count() -> None:
    room = KVRoom(100, 70)
    for step in range(1000):
        room.observe(PLAIN if step % 40 else DRAFTS)
    assert lent(room) == 70


def test_a_loan_ends_once_its_slots_are_free_and_nothing_waits() -> None:
    room = HastyRoom(100, 70)
    for _ in range(4):
        room.observe(PLAIN)
    assert lent(room)
    room.settle(150, is_enough=True)
    assert room.lent
    room.settle(100, is_enough=False)
    assert room.lent
    room.settle(100, is_enough=True)
    assert (room.lent, room.slots) == (0, 100)
    assert not lent(room)  # the policy is seen not drafting first
    for _ in range(4):
        room.observe(PLAIN)
    assert lent(room)


def test_a_long_loan_takes_no_more_requests_so_that_it_can_end() -> None:
    room = HastyRoom(100, 70)
    for _ in range(4):
        room.observe(PLAIN)
    assert lent(room)
    for _ in range(HastyRoom.LOAN):
        assert room.slots == 170
        room.observe(PLAIN)
    assert (room.slots, room.lent) == (100, 70)
    room.settle(101, is_enough=False)
    assert room.lent
    room.settle(100, is_enough=False)
    assert not room.lent


def test_nothing_is_lent_while_memory_is_short() -> None:
    room = HastyRoom(100, 70)
    for _ in range(4):
        room.observe(PLAIN)
    room.tighten(60)
    assert (lent(room), room.slots) == (0, 60)
    room.relax()
    assert (lent(room), room.slots) == (70, 170)


@pytest.mark.parametrize("draft_slots", [0, 40])
def test_more_requests_run_together_where_nothing_is_drafted(draft_slots: int) -> None:
    served = Served(Limits(8, 220, 4, 64, 1e9, draft_slots))
    served.scheduler.room = HastyRoom(220, draft_slots)
    requests = [served.add(0, prompt=10, new=190), *(served.add(index, prompt=10, new=10) for index in range(1, 9))]
    most = 0
    while served.scheduler.running or served.scheduler.waiting:
        served.step()
        most = max(most, served.scheduler.kv_held)
        assert served.scheduler.kv_held <= 220 + served.scheduler.lent_slots
    assert most == 220 + draft_slots
    assert all(request.finish_reason == "length" for request in requests)


def test_nothing_is_drafted_while_the_drafters_memory_is_lent() -> None:
    served = Served(Limits(8, 60, 2, 64, 1e9, 40), policy=NowAndThen(Plan(2, 1)))
    served.scheduler.room = HastyRoom(60, 40)
    relieved = list[int]()
    served.drafter.relieve = lambda: relieved.append(served.scheduler.lent_slots) or True
    for index in range(12):
        served.add(index, prompt=8, new=20)
    num_lent = num_drafted = 0
    while served.scheduler.running or served.scheduler.waiting:
        event = served.step()
        num_lent += served.scheduler.lent_slots > 0
        num_drafted += event.draft_levels > 0
        assert not (event.draft_levels and served.engine._lent_slots)
    assert num_lent and num_drafted
    assert relieved and all(slots == 40 for slots in relieved)  # once for each loan
