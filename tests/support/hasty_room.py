"""A room for K/V that lends again soon after a loan."""

from __future__ import annotations

from hf_slospec.engine.scheduling.kv_room import KVRoom


class HastyRoom(KVRoom):
    GAP, PATIENCE = 2, 4
