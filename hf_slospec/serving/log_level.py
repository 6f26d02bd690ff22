"""Logging of the package while a command shows its own output."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Log only errors of the package inside the context: no warnings about the SLOs of single requests."""
    logger = logging.getLogger("hf_slospec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def logged_afterwards() -> Iterator[None]:
    """Keep log records of the package inside the context, and write them to standard error at the end."""
    logger, output = logging.getLogger("hf_slospec"), logging.StreamHandler()
    output.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    buffer = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, target=output)
    logger.addHandler(buffer)
    try:
        yield
    finally:
        logger.removeHandler(buffer)
        buffer.close()  # writes the records
