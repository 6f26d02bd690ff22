"""Warnings of this package with their logger's name, if the application has set up no logging."""

from __future__ import annotations

import logging
import sys


class LastResort(logging.Handler):
    """Prints warnings as ``logging.lastResort`` does, with time and name of the logger; prints
    nothing if the application has a handler for the record.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        print(self.format(record), file=sys.stderr)


def install() -> None:
    """Let warnings of this package be printed with their logger's name."""
    logger = logging.getLogger(__package__)
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        handler = LastResort(logging.WARNING)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
