"""Display of what a command is doing, so that no command is silent for longer than five seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

QUIET_S = 5.0  # seconds between two lines, where the output is no terminal
REFRESH_S = 1.0  # seconds between two updates of the line in a terminal

Say = Callable[[str], None]


class _Records(logging.Handler):
    """Log handler that shows records below WARNING as the activity, and prints all others."""

    def __init__(self, show: Say, report: Say):
        super().__init__(logging.INFO)
        self._show = show
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            self._show(record.getMessage())
        else:
            self._report(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def activity(text: str, console: Console | None = None) -> Iterator[Say]:
    """Show an activity and the seconds since it began, until the context ends: in a terminal in a
    line that is updated, else in a line every ``QUIET_S`` seconds.

    Log records of the package, such as the start of a compiler, replace the text.

    Args:
        text: what is done.
        console: default: standard error.

    Yields:
        A function that replaces the text.
    """
    console = console or Console(stderr=True, soft_wrap=True)
    report = _printer(console)
    begun_s = time.monotonic()
    shown = [text, begun_s]
    ended = threading.Event()
    status = console.status(text) if console.is_terminal else None

    def show(new_text: str) -> None:
        shown[:] = new_text, time.monotonic()

    def repeat() -> None:
        interval_s = QUIET_S if status is None else REFRESH_S
        while not ended.wait(interval_s):
            line = f"{shown[0]} ({time.monotonic() - shown[1]:.0f} s)"
            if status is None:
                report(line)
            else:
                status.update(line)

    logger = logging.getLogger("hf_slospec")
    level = logger.level
    handler = _Records(show, report)
    thread = threading.Thread(target=repeat, daemon=True)
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    thread.start()
    try:
        with status or contextlib.nullcontext():
            yield show
    finally:
        ended.set()
        thread.join()
        logger.setLevel(level)
        logger.removeHandler(handler)


def _printer(console: Console) -> Say:
    return lambda line: console.print(line, style="dim", markup=False, highlight=False)
