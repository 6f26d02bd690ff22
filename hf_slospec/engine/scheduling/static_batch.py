"""The scheduler of one ``generate`` call: first prefill all prompts, then decode all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Chunk, Schedule
from hf_slospec.engine.request import Request

CHUNK = 512  # maximum prefill tokens per request and step; masks grow with its square


class StaticScheduler:
    """Schedules requests that begin together, all of them in every step."""

    lent_slots = 0  # requests do not wait for slots

    def __init__(self, requests: Sequence[Request], begin: Callable[[Sequence[Request]], None] | None = None):
        """Begin with all prompts to prefill; ``begin`` is called once, when all requests decode."""
        self.running, self._begin = list(requests), begin

    def enter(self, now_s: float) -> Sequence[Request]:
        """Do nothing: no request waits."""
        return ()

    def schedule(self, now_s: float) -> Schedule:
        """Return chunks of all unfinished prompts, or all requests once there are none."""
        chunks = [Chunk.of(request, CHUNK) for request in self.running if not request.is_decoding]
        if not chunks and self._begin is not None:
            self._begin(self.running)
            self._begin = None
        return Schedule([], chunks) if chunks else Schedule(self.running)

    def observe(self, step: StepEvent) -> None:
        """Learn nothing: the schedule does not depend on time."""

    def remove(self, request: Request) -> None:
        """Remove a request that has finished."""
        self.running.remove(request)
