"""Stream: the consecutive requests of one user of the demo; and View: a snapshot of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.texts import ToText
from hf_slospec.demo.generator import HighlightedText, TextPiece
from hf_slospec.demo.personas import UserRequest
from hf_slospec.engine.events import Commit
from hf_slospec.errors import NotRunningError, QueueFull, RequestCancelledError
from hf_slospec.request.metrics import RequestMetrics

WINDOW_S = 3.0  # seconds over which current speeds are averaged


class Gain(NamedTuple):
    at_s: float
    tokens: int
    nodes: int  # nodes verified for the request in this step


def gains(commits: Sequence[Commit]) -> list[Gain]:
    """Return tokens and verified nodes of one request for every step, except for the first token,
    which the prefill commits.
    """
    return [
        Gain(later.at_s, later.num_emitted - earlier.num_emitted, later.num_nodes)
        for earlier, later in pairwise(commits)
    ]


def recent(all_gains: Iterable[Gain], now_s: float, window_s: float = WINDOW_S) -> list[Gain]:
    """Return the steps of the last ``window_s`` seconds."""
    return [gain for gain in all_gains if now_s - window_s < gain.at_s <= now_s]


def tokens_per_s(all_gains: Iterable[Gain], now_s: float, begun_s: float) -> float:
    """Return tokens per second over the last :data:`WINDOW_S` seconds, or since ``begun_s`` if that
    was more recently.
    """
    span_s = min(WINDOW_S, now_s - begun_s)
    return (
        sum(gain.tokens for gain in recent(all_gains, now_s, span_s)) / span_s
        if span_s > 0
        else 0.0
    )


def shares(nodes: Sequence[int]) -> list[float]:
    """Return each user's share of all verified nodes; zeros if there are none."""
    total = sum(nodes)
    return [number / total if total else 0.0 for number in nodes]


Submit = Callable[[UserRequest, int], RequestHandle]  # the number is a seed
State = Literal["waiting", "writing", "finished", "stopped", "paused", "failed"]
PAUSE_S = 1.5  # seconds between two requests of a simulated user
RETRY_S = 5.0  # seconds after which a simulated user asks again if its request was refused


@dataclass(frozen=True)
class View:
    name: str
    description: str
    state: State
    user_request: UserRequest
    pieces: tuple[TextPiece, ...]
    metrics: RequestMetrics | None  # the current request's; None: there was no request yet
    tokens_per_s: float  # over the last WINDOW_S seconds
    nodes: int  # nodes verified for the user in the last WINDOW_S seconds
    num_attained: int  # finished requests that met their SLO
    num_judged: int  # finished requests with an SLO
    error: str | None
    version: int  # changes with user_request

    @property
    def is_active(self) -> bool:
        """Return whether the current request is waiting or being decoded."""
        return self.state in ("waiting", "writing")


@dataclass
class Stream:
    """The requests of one user; a simulated user repeats a finished request after a pause."""

    name: str
    description: str
    user_request: UserRequest
    is_simulated: bool
    version: int
    to_text: ToText

    def __post_init__(self) -> None:
        self._text = HighlightedText(self.to_text)
        self._handle: RequestHandle | None = None
        self._past: deque[Gain] = deque()  # steps of the requests before the current one
        self._num_attained = self._num_judged = 0
        self._num_started = 0
        self._ended_s: float | None = None
        self._submit_error: Exception | None = None
        self._is_stopped = False
        self._is_paused = False

    def start(self, submit: Submit, now_s: float) -> None:
        """Cancel the current request and submit the user's request. An error of ``submit`` is
        raised, and also shown in later views.
        """
        self.stop(now_s)
        self._handle = None
        self._submit_error = None
        self._is_stopped = False
        self._num_started += 1
        try:
            self._handle = submit(self.user_request, self._num_started)
            self._text = HighlightedText(self.to_text)
        except Exception as error:
            self._submit_error = error
            self._ended_s = now_s
            raise
        self._ended_s = None

    def pause(self, now_s: float) -> None:
        """Stop a stream with requests to come, as one to be started again after a race."""
        if not self._is_stopped and (self.is_simulated or self.state in ("waiting", "writing")):
            self.stop(now_s)
            self._is_paused = True

    def stop(self, now_s: float) -> None:
        """Cancel the current request; views still show its text so far."""
        self._is_paused = False
        if self._handle is not None and not self._is_stopped:  # otherwise _past has its commits
            self._handle.cancel()
            self._past.extend(gains(self._handle.commits))
        while self._past and self._past[0].at_s < now_s - WINDOW_S:
            self._past.popleft()
        self._is_stopped = True

    def reset(self) -> None:
        """Forget all counts, past speeds and seeds; the current request's speed stays."""
        self._num_attained = self._num_judged = self._num_started = 0
        self._past.clear()

    @property
    def state(self) -> State:
        handle = self._handle
        if self._submit_error is not None:
            return "failed"
        if self._is_stopped or handle is None:
            return "paused" if self._is_paused else "stopped"
        if handle.finish_reason is None:
            return "writing" if handle.commits else "waiting"
        ended: dict[str, State] = {"error": "failed", "cancelled": "stopped"}
        return ended.get(handle.finish_reason, "finished")

    def is_due(self, now_s: float) -> bool:
        """Return whether to start a simulated user's next request: its last request has finished or
        was refused, and the pause after it is over.
        """
        self._count(now_s)
        is_refused = self.state == "failed" and isinstance(self._error, NotRunningError | QueueFull)
        if (
            self._is_stopped
            or not self.is_simulated
            or not (is_refused or self.state == "finished")
        ):
            return False
        return now_s - (self._ended_s or now_s) >= (RETRY_S if is_refused else PAUSE_S)

    @property
    def _error(self) -> BaseException | None:
        if self._handle is None:
            return self._submit_error
        error = self._handle.request.error if self._handle.done() else None
        return None if isinstance(error, RequestCancelledError) else error

    def _count(self, now_s: float) -> None:
        """Update the counts by the current request, once, when it has ended."""
        if (
            self._ended_s is None
            and self._handle is not None
            and self._handle.finish_reason is not None
        ):
            self._ended_s = now_s
            attained = self._handle.metrics.attained
            if self.state == "finished" and attained is not None:
                self._num_attained += attained
                self._num_judged += 1

    @property
    def counts(self) -> tuple[int, int]:
        """Finished requests that met their SLO, and those with an SLO."""
        return self._num_attained, self._num_judged

    def view(self, now_s: float) -> View:
        self._count(now_s)
        handle = self._handle
        steps = list(self._past)
        begun_s = now_s
        pieces: list[TextPiece] = []
        if handle is not None:
            commits = handle.commits
            steps += [] if self._is_stopped else gains(commits)
            begun_s = (
                steps[0].at_s if self._past and steps else (commits[0].at_s if commits else now_s)
            )
            is_last = handle.done()  # read first, as further tokens may come
            pieces = self._text.update(handle.token_ids, handle.from_draft, is_last)
        return View(
            name=self.name,
            description=self.description,
            state=self.state,
            user_request=self.user_request,
            pieces=tuple(pieces),
            metrics=None if handle is None else handle.metrics,
            tokens_per_s=tokens_per_s(steps, now_s, begun_s),
            nodes=sum(gain.nodes for gain in recent(steps, now_s)),
            num_attained=self._num_attained,
            num_judged=self._num_judged,
            error=None if self._error is None else str(self._error) or type(self._error).__name__,
            version=self.version,
        )
