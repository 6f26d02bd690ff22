"""A room for K/V that lends again soon after a loan."""

from __future__ import annotations

from hf_slospec.engine.scheduling.continuous import ContinuousScheduler
from hf_slospec.engine.scheduling.kv_room import KVRoom


class HastyRoom(KVRoom):
    GAP, PATIENCE = 2, 4


def hasten(scheduler: ContinuousScheduler) -> None:
    """Let a scheduler that has not begun lend as often as it may."""
    limits = scheduler.limits
    scheduler.room = HastyRoom(limits.kv_tokens, limits.draft_slots, limits.max_batch, scheduler.costs)
