"""A policy whose trees do not depend on measured times."""

from __future__ import annotations

from contextlib import contextmanager

FIXED = {
    "policy": "fixed",
    "max_depth": 4,
    "max_width": 1,
}  # settings: four nodes in every step


@contextmanager
def always_drafting(generator):
    """Draft in every step of ``generator`` inside of the context; ``auto`` may draft nothing on a
    busy machine.
    """
    generator.set_policy(generator.config.model_copy(update=FIXED))
    try:
        yield
    finally:
        generator.set_policy(generator.config)
