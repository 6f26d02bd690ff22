"""The figures requests are judged by."""

from __future__ import annotations


def tpot_s(first_token_s: float, last_token_s: float, num_tokens: int) -> float | None:
    """Time per output token: (last - first) / (tokens - 1), in seconds; undefined for fewer than two tokens."""
    return None if num_tokens < 2 else (last_token_s - first_token_s) / (num_tokens - 1)


def is_attained(measured_tpot_s: float | None, target_s: float | None) -> bool | None:
    """Whether the target was met; None without a target. With no second token there was nothing to be late with."""
    if target_s is None:
        return None
    return measured_tpot_s is None or measured_tpot_s <= target_s
