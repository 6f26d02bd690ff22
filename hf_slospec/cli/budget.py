"""Time budget of a command, and a display of the time used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

clock = time.monotonic
Show = Callable[..., None]  # takes the present activity, and details


class TimeBudget:
    """Clock of a command that may take so many seconds, started when it is made."""

    def __init__(self, seconds: float):
        self.seconds, self._started_s = seconds, clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return clock() - self._started_s

    def allows(self, expected_s: float, share: float = 1.0) -> bool:
        """Return whether work of this length would end within a share of the time."""
        return self.elapsed_s + expected_s <= share * self.seconds


@contextmanager
def progress_shown(console: Console, budget: TimeBudget) -> Iterator[Show]:
    """Yield a function that shows the present activity: by a bar on a terminal, else by a line per activity."""
    if not console.is_terminal:
        last = ""

        def print_line(now: str, details: str = "") -> None:
            nonlocal last
            if now != last:
                console.print(f"{now} ({budget.elapsed_s:.0f} s)", markup=False, highlight=False, soft_wrap=True)
            last = now

        yield print_line
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TextColumn("of")
    with Progress(
        *columns, TextColumn(f"at most about {budget.seconds:.0f} s"), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=budget.seconds)

        def update(now: str, details: str = "") -> None:
            bar.update(task, description=f"{now} {details}".strip(), completed=min(budget.elapsed_s, budget.seconds))

        yield update
