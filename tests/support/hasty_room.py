"""A room for K/V that lends and returns within a few steps."""

from __future__ import annotations

from hf_slospec.engine.scheduling.kv_room import KVRoom


class HastyRoom(KVRoom):
    PATIENCE, SELDOM, LOAN = 1, 0.5, 8
