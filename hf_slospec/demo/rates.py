"""Speeds and budget shares, from the commits of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hf_slospec.engine.events import Commit

WINDOW_S = 3.0  # seconds over which current speeds are averaged
HISTORY_S = 30  # seconds


class Gain(NamedTuple):
    """Progress of one request in one step."""

    at_s: float
    tokens: int
    nodes: int  # verified for it in the step


def gains(commits: Sequence[Commit]) -> list[Gain]:
    """Return the progress of one request by step, without its first token, which the prefill commits."""
    return [Gain(now.at_s, now.num_emitted - before.num_emitted, now.num_nodes) for before, now in pairwise(commits)]


def recent(all_gains: Iterable[Gain], now_s: float, window_s: float = WINDOW_S) -> list[Gain]:
    """Return the steps of the last ``window_s`` seconds."""
    return [gain for gain in all_gains if now_s - window_s < gain.at_s <= now_s]


def tokens_per_s(all_gains: Iterable[Gain], now_s: float, begun_s: float) -> float:
    """Return the speed over the last :data:`WINDOW_S` seconds, or since ``begun_s`` if that is shorter."""
    span_s = min(WINDOW_S, now_s - begun_s)
    return sum(gain.tokens for gain in recent(all_gains, now_s, span_s)) / span_s if span_s > 0 else 0.0


def history(all_gains: Iterable[Gain], now_s: float) -> list[float]:
    """Return tokens per second in each of the last :data:`HISTORY_S` seconds, the oldest first."""
    counts = [0.0] * HISTORY_S
    for gain in all_gains:
        age_s = now_s - gain.at_s
        if 0 <= age_s < HISTORY_S:
            counts[HISTORY_S - 1 - int(age_s)] += gain.tokens
    return counts


def shares(nodes: Sequence[int]) -> list[float]:
    """Return each user's share of all verified nodes; zeros if there are none."""
    total = sum(nodes)
    return [number / total if total else 0.0 for number in nodes]
