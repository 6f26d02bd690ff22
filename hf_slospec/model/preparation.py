"""Preparation of a model by plugins, before its forwards are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_slospec.assembly import load_plugins
from hf_slospec.config import SLOSpecConfig

Preparation = Callable[[Any, SLOSpecConfig], None]
_preparations: list[Preparation] = []


def register_preparation(preparation: Preparation) -> None:
    """Register a function of a model and its settings that may replace weights in place."""
    if preparation not in _preparations:
        _preparations.append(preparation)


def prepare(model: Any, config: SLOSpecConfig) -> None:
    """Prepare a model by the functions of plugins.

    Raises:
        UnsupportedOptionError: see the plugins' functions.
    """
    load_plugins()
    for preparation in _preparations:
        preparation(model, config)
