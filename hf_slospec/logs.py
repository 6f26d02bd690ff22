"""Warnings of this package with their logger's name, if the application has set up no logging."""

from __future__ import annotations

import logging
import sys


class LastResort(logging.Handler):
    """Prints warnings as ``logging.lastResort`` does, with time and name of the logger; prints
    nothing once the application has a handler.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and logging.getLogger(__package__).handlers == [self]:
            print(self.format(record), file=sys.stderr)


def install() -> None:
    """Let warnings of this package be printed with their logger's name."""
    logger = logging.getLogger(__package__)
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        handler = LastResort(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
