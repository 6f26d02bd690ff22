"""Counts of captured, replayed and eager forwards."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hf_slospec.cuda.graphs import Graphs
from hf_slospec.model.packed_model import PackedModel


@dataclass
class ForwardCounts:
    """Packed forwards of all models, and what torch.compile compiled."""

    forwards: int = 0
    captures: int = 0
    replays: int = 0
    compilations: int = 0

    @property
    def has_prepared(self) -> bool:
        """Return whether forwards were captured or compiled, which later calls need not repeat."""
        return bool(self.captures or self.compilations)

    def as_record(self) -> dict[str, int]:
        """Return all counts, with the number of eager forwards."""
        return asdict(self) | {"eager": self.forwards - self.captures - self.replays}


@contextlib.contextmanager
def counting() -> Iterator[ForwardCounts]:
    """Count within the context."""
    counts = ForwardCounts()
    compiled = _num_compiled()

    def count_forward(_: Any) -> None:
        counts.forwards += 1

    def count_graph(outputs: Any) -> None:
        counts.replays += outputs is not None

    def count_capture(outputs: Any) -> None:
        counts.captures += outputs is not None
        counts.replays -= outputs is not None  # the call around it returns the same outputs

    with (
        called(PackedModel, "outputs", count_forward),
        called(Graphs, "run", count_graph),
        called(Graphs, "_capture", count_capture),
    ):
        yield counts
    counts.compilations = _num_compiled() - compiled


@contextlib.contextmanager
def called(owner: type, name: str, after: Callable[[Any], None]) -> Iterator[None]:
    """Pass the result of every call of a method to ``after``, within the context."""
    with replaced(owner, name, lambda method: _followed(method, after)):
        yield


@contextlib.contextmanager
def replaced(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method by a wrapper of it within the context."""
    method = vars(owner)[name]
    setattr(owner, name, functools.wraps(method)(wrap(method)))
    try:
        yield
    finally:
        setattr(owner, name, method)


def _followed(method: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        after(result)
        return result

    return run


def _num_compiled() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
