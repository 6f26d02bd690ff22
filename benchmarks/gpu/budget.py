"""Time limits of a check."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """A time limit that starts when it is created."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s = limit_s
        self._clock = clock
        self._begun_s = clock()

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begun_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative beyond it."""
        return self.limit_s - self.spent_s

    def share(self, seconds: float) -> Budget:
        """Return a new budget of ``seconds``, or of the seconds left if they are fewer."""
        return Budget(min(seconds, self.left_s), self._clock)
