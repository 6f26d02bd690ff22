"""Latency metrics of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 10  # tokens


def tpot_s(first_token_s: float, last_token_s: float, num_tokens: int) -> float | None:
    """Return the time per output token, (last - first) / (tokens - 1), in seconds; None for fewer than two tokens."""
    return None if num_tokens < 2 else (last_token_s - first_token_s) / (num_tokens - 1)


def is_attained(measured_tpot_s: float | None, tpot_slo_s: float | None) -> bool | None:
    """Return whether the TPOT SLO was met; None without one. A TPOT of None (fewer than two tokens) meets it."""
    if tpot_slo_s is None:
        return None
    return measured_tpot_s is None or measured_tpot_s <= tpot_slo_s


def worst_tpot_s(commits: Sequence[tuple[int, float]]) -> float | None:
    """Return the highest time per token over any :data:`WINDOW` consecutive tokens (SLOs-Serve's TPOT, all windows).

    Tokens of one step arrive together, so single gaps (ITL) are bursts.

    Args:
        commits: after each step, the number of tokens emitted so far and the time in seconds, ascending.

    Returns:
        Seconds; None for fewer than ``WINDOW + 1`` tokens.
    """
    if not commits or commits[-1][0] <= WINDOW:
        return None
    counts, times = np.array([count for count, _ in commits]), np.array([time_s for _, time_s in commits])
    arrival = times[np.searchsorted(counts, np.arange(1, counts[-1] + 1))]  # [num_tokens] f64
    return float((arrival[WINDOW:] - arrival[:-WINDOW]).max() / WINDOW)
