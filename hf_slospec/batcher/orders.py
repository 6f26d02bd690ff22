"""Orders that other threads give to the batcher's thread, the batcher's state and counts, and the
interface of its observer.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.engine.events import StepEvent
from hf_slospec.request.request import Request
from hf_slospec.scheduler.load import ReplicaLoad


class BatcherState(Enum):
    """State of a running batcher, which says what it does with requests."""

    TAKING = "takes and decodes them"
    DRAINING = "takes no more, and decodes those it has"
    STOPPING = "cancels them"


class Counts(NamedTuple):
    """Present load of a batcher; the fields have the names of the fields of :class:`Stats`."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kept_tokens: int = 0


@dataclass(frozen=True)
class Abort:
    """Order to end a request: as cancelled or, with an error, as failed."""

    handle: RequestHandle
    error: BaseException | None


@dataclass(frozen=True)
class LoadReport:
    """Order to set a future to the scheduler's load."""

    future: Future[ReplicaLoad]


Order = RequestHandle | Abort | LoadReport  # a RequestHandle is the order to decode its request


class Observer(Protocol):
    """Callbacks that the batcher's thread calls. Exceptions that they raise are logged and do not
    end requests.
    """

    def on_step(self, step: StepEvent) -> None:
        """Handle the end of a step."""

    def on_end(self, request: Request) -> None:
        """Handle a request that has finished, was cancelled or failed."""
