"""Display of what a command is doing, so that no command is silent for longer than five seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

QUIET_S = 5.0  # seconds between two lines, where the output is no terminal
REFRESH_S = 0.5  # seconds between two updates of the line in a terminal


class Activity(logging.Handler):
    """Text and duration of what a command is doing.

    It handles log records of the package: those below WARNING, such as the start of a compiler, are
    shown as details of the activity, all others are printed.
    """

    def __init__(self, text: str, console: Console):
        super().__init__(logging.INFO)
        self._console = console
        self._text = text
        self._detail = ""
        self._begun_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Replace the text, and begin to count its seconds."""
        self._text = text
        self.detail("")

    def detail(self, detail: str) -> None:
        """Replace what is shown after the text, and begin to count its seconds."""
        self._detail = detail
        self._begun_s = time.monotonic()

    @property
    def line(self) -> str:
        """The text, its detail and the seconds since they were set."""
        seconds = time.monotonic() - self._begun_s
        return ": ".join(filter(None, (self._text, self._detail))) + f" ({seconds:.0f} s)"

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            self.detail(record.getMessage())
        else:
            self.print(f"{record.levelname}: {record.getMessage()}")

    def print(self, line: str) -> None:
        """Print a line above the activity."""
        self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def can_update(console: Console) -> bool:
    """Return whether lines that were printed can be replaced."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.contextmanager
def activity(text: str, console: Console | None = None) -> Iterator[Activity]:
    """Show an activity until the context ends: in a terminal in a line that is updated, else in a
    line every ``QUIET_S`` seconds.

    Args:
        text: what is done.
        console: default: standard error.
    """
    console = console or Console(stderr=True, soft_wrap=True)
    shown = Activity(text, console)
    status = console.status(text) if can_update(console) else None
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(QUIET_S if status is None else REFRESH_S):
            if status is None:
                shown.print(shown.line)
            else:
                status.update(escape(shown.line))

    logger = logging.getLogger("hf_slospec")
    level = logger.level
    thread = threading.Thread(target=repeat, daemon=True)
    logger.addHandler(shown)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    thread.start()
    try:
        with status or contextlib.nullcontext():
            yield shown
    finally:
        ended.set()
        thread.join()
        logger.setLevel(level)
        logger.removeHandler(shown)
