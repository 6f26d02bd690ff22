"""Calls of an enabled model."""

from __future__ import annotations

from typing import Any

from tests.support.breadth import quick_or

OPTIONS: dict[str, Any] = dict(do_sample=False, max_new_tokens=quick_or(12, 20))


def with_slo(model: Any) -> Any:
    return lambda **kwargs: model.generate(**kwargs, slo_tpot=0.05)
