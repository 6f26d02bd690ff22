"""Orders of other threads to the batcher's, the state that they bring it to, and its observer."""

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
    """State of a running batcher, by its treatment of requests."""

    TAKING = "takes and decodes them"
    DRAINING = "takes no more, and decodes those it has"
    STOPPING = "cancels them"


class Counts(NamedTuple):
    """Present load of a batcher; the fields are those of :class:`Stats`."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kept_tokens: int = 0


@dataclass(frozen=True)
class Abort:
    """Order to end a request, as cancelled or, with an error, as failed."""

    handle: RequestHandle
    error: BaseException | None


@dataclass(frozen=True)
class LoadReport:
    """Order to report the engine's load."""

    future: Future[ReplicaLoad]


Order = RequestHandle | Abort | LoadReport  # a handle is the order to decode its request


class Observer(Protocol):
    """Callbacks that a batcher calls in its thread. Their errors are logged, and end no request."""

    def on_step(self, step: StepEvent) -> None:
        """Handle the end of a step."""

    def on_end(self, request: Request) -> None:
        """Handle a request that finished, was cancelled or failed."""
