"""The scheduler of one ``generate`` call: first prefill all prompts, then decode all requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.interfaces import Chunk, Schedule
from hf_slospec.request.request import Request

CHUNK = 512  # maximum prefill tokens per request and step; masks grow with its square
MIN_SHARED = 32  # tokens of a prompt; prefilling fewer for every request is faster than a step more


class StaticScheduler:
    """Schedules requests that begin together, all of them in every step."""

    def __init__(
        self,
        requests: Sequence[Request],
        begin: Callable[[Sequence[Request]], None] | None = None,
        shares_prompts: bool = False,
    ):
        """Begin with all prompts to prefill.

        Args:
            requests: all of them.
            begin: called once, when all requests decode.
            shares_prompts: the target gives requests the K/V of others with the same prompt: of
                equal prompts, the first is prefilled up to its last token before the others begin.
        """
        self.running = list(requests)
        self._begin = begin
        self._first_of: dict[Request, Request] = _first_of_equal(requests) if shares_prompts else {}
        self._firsts = set(self._first_of.values())

    def enter(self, now_s: float) -> Sequence[Request]:
        """Do nothing: no request waits."""
        return ()

    def schedule(self, now_s: float) -> Schedule:
        """Return chunks of all unfinished prompts, or all requests once there are none."""
        unfinished = [request for request in self.running if not request.is_decoding]
        chunks = [
            Chunk.of(request, self._limit(request))
            for request in unfinished
            if not self._waits(request)
        ]
        if not chunks and self._begin is not None:
            self._begin(self.running)
            self._begin = None
        return Schedule([], chunks) if chunks else Schedule(self.running)

    def _waits(self, request: Request) -> bool:
        """Return whether K/V is being computed that the request can use."""
        first = self._first_of.get(request)
        return first is not None and not first.is_finished and first.num_uncached > 1

    def _limit(self, request: Request) -> int:
        """Return the maximum prefill tokens of a request in this step."""
        return min(CHUNK, max(request.num_uncached - 1, 1)) if request in self._firsts else CHUNK

    def observe(self, step: StepEvent) -> None:
        """Learn nothing: the schedule does not depend on time."""

    def remove(self, request: Request) -> None:
        """Remove a request that has finished."""
        self.running.remove(request)


def _first_of_equal(requests: Sequence[Request]) -> dict[Request, Request]:
    """Return the first request with the same prompt, for each but the first."""
    firsts: dict[tuple[int, ...], Request] = {}
    pairs = [
        (each, firsts.setdefault(tuple(each.params.prompt), each))
        for each in requests
        if _may_share(each)
    ]
    return {request: first for request, first in pairs if request is not first}


def _may_share(request: Request) -> bool:
    return (
        request.params.prefill is None
        and request.kv.num_cached == 0
        and request.prompt_len > MIN_SHARED
    )
