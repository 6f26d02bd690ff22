"""For commands that show in their own way what the package would log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Within, nobody hears of single requests that are late."""
    logger = logging.getLogger("hf_slospec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
