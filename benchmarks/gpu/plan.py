"""Settings of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Settings of a check."""

    device: str
    sizes: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    budget_s: float
    runs_tests: bool
    identity_size: str
    profiles: bool = False
