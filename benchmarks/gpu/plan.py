"""Settings of a check."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.contestants import METHODS


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
    methods: tuple[str, ...] = METHODS
    drafter: str | None = None  # the embedded head that drafts; None: the embedded draft model

    @property
    def checks(self) -> bool:
        """Return whether identity and tests are checked: not where only some methods are timed, or with
        a head.
        """
        return self.methods == METHODS and self.drafter is None
