"""The figures requests are judged by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 10  # tokens


def tpot_s(first_token_s: float, last_token_s: float, num_tokens: int) -> float | None:
    """Time per output token: (last - first) / (tokens - 1), in seconds; undefined for fewer than two tokens."""
    return None if num_tokens < 2 else (last_token_s - first_token_s) / (num_tokens - 1)


def is_attained(measured_tpot_s: float | None, tpot_slo_s: float | None) -> bool | None:
    """Whether the target was met; None without a target. With no second token there was nothing to be late with."""
    if tpot_slo_s is None:
        return None
    return measured_tpot_s is None or measured_tpot_s <= tpot_slo_s


def worst_tpot_s(commits: Sequence[tuple[int, float]]) -> float | None:
    """Highest time per token over any :data:`WINDOW` tokens in a row (SLOs-Serve's TPOT, over all windows).

    Tokens of one step arrive together, so gaps of single tokens say little.

    Args:
        commits: after each step, the tokens emitted so far and when, ascending.

    Returns:
        Seconds; None for fewer than ``WINDOW + 1`` tokens.
    """
    if not commits or commits[-1][0] <= WINDOW:
        return None
    counts, times = np.array([count for count, _ in commits]), np.array([time_s for _, time_s in commits])
    arrival = times[np.searchsorted(counts, np.arange(1, counts[-1] + 1))]  # [num_tokens] f64
    return float((arrival[WINDOW:] - arrival[:-WINDOW]).max() / WINDOW)
