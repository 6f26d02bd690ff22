"""Seconds that a check may take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """What is left of a number of seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s, self._clock, self._begun_s = limit_s, clock, clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._begun_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s

    def share(self, seconds: float) -> Budget:
        """A budget of this many of the seconds left, or of all of them if they are fewer."""
        return Budget(min(seconds, self.left_s), self._clock)
