"""Time budget of a command, and lines that show the time used."""

from __future__ import annotations

import time

from rich.console import Console

clock = time.monotonic


class TimeBudget:
    """Clock of a command that may take so many seconds, started when it is made."""

    def __init__(self, seconds: float, console: Console):
        self.seconds, self.console = seconds, console
        self._started_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return clock() - self._started_s

    def allows(self, expected_s: float, share: float) -> bool:
        """Return whether work of this length would end within a share of the time."""
        return self.elapsed_s + expected_s <= share * self.seconds

    def show(self, activity: str) -> None:
        """Print what is done now, and the time used."""
        line = f"{activity} ({self.elapsed_s:.0f} s)"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
