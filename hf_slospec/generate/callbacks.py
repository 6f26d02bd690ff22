"""Processors, criteria and streamers that the user wrote, and may run the model or draw random numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria, streamers
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

OF_TRANSFORMERS = {module.__name__ for module in (logits_process, stopping_criteria, streamers)}


def is_stock(callback: Any) -> bool:
    """Return whether transformers defines the class of a callback."""
    return type(callback).__module__ in OF_TRANSFORMERS


def is_users(callback: Any) -> bool:
    """Return whether the user wrote a callback, or a function that it calls."""
    is_ours = type(callback).__module__.partition(".")[0] == __name__.partition(".")[0]
    return not (is_stock(callback) or is_ours) or isinstance(callback, PrefixConstrainedLogitsProcessor)


def copied_for_row(callback: Any) -> Any:
    """Return a deep copy of a user's callback, which refers to the same models."""
    held = [getattr(value, "__self__", value) for value in getattr(callback, "__dict__", {}).values()]
    return copy.deepcopy(callback, {id(value): value for value in held if isinstance(value, torch.nn.Module)})
