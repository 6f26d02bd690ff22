"""Processors, criteria and streamers that the user wrote, and may run the model or draw random numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
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
    return copy.deepcopy(callback, {id(module): module for module in _modules_in(callback, set())})


def _modules_in(value: Any, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Yield the modules that an object holds, in containers, partial functions and bound methods, too."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from _modules_in(held, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for held in value:
            yield from _modules_in(held, seen)
    elif isinstance(value, MethodType):
        yield from _modules_in(value.__self__, seen)
    elif isinstance(value, functools.partial):
        yield from _modules_in((value.func, value.args, value.keywords), seen)
    elif not isinstance(value, (type, FunctionType, ModuleType, torch.Tensor)):
        yield from _modules_in(getattr(value, "__dict__", {}), seen)
