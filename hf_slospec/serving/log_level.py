"""Log level of the package, for commands that show in their own way what it would log."""

from __future__ import annotations

import contextlib
import logging
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
