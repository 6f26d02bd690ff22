"""Calls of an enabled model."""

from __future__ import annotations

from tests.support.breadth import quick_or

OPTIONS = dict(do_sample=False, max_new_tokens=quick_or(12, 20))
