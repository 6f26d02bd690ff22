"""Whose turn it is in a batch: first all prompts, then all requests."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Chunk, Schedule
from hf_slospec.engine.request import Request

CHUNK = 512  # prefill tokens of a request and step at most: masks grow with the square of it


class StaticScheduler:
    """Requests that begin and go on together."""

    def __init__(self, requests: Sequence[Request]):
        self.running = list(requests)

    def schedule(self, now_s: float) -> Schedule:
        chunks = [Chunk.of(request, CHUNK) for request in self.running if not request.is_decoding]
        return Schedule([], chunks) if chunks else Schedule(self.running)

    def observe(self, step: StepEvent) -> None:
        """Nothing is learned."""

    def remove(self, request: Request) -> None:
        self.running.remove(request)
