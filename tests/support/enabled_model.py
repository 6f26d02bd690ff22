"""Calls of an enabled model."""

from __future__ import annotations

from typing import Any

from tests.support.breadth import quick_or

OPTIONS: dict[str, Any] = dict(do_sample=False, max_new_tokens=quick_or(12, 20))
