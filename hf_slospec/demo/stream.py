"""One user's requests, one after the other, and how they look at a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hf_slospec.demo.highlight import HighlightedText, Piece
from hf_slospec.demo.personas import Wish
from hf_slospec.demo.rates import HISTORY_S, Gain, gains, history, recent, tokens_per_s
from hf_slospec.engine.request import RequestMetrics
from hf_slospec.errors import RequestCancelledError
from hf_slospec.serving.handle import RequestHandle, ToText

Submit = Callable[[Wish], RequestHandle]
State = Literal["waiting", "writing", "finished", "stopped", "failed"]
PAUSE_S = 1.5  # of a simulated user between two requests


@dataclass(frozen=True)
class View:
    """A stream at a moment."""

    name: str
    wants: str
    state: State
    wish: Wish
    pieces: tuple[Piece, ...]
    metrics: RequestMetrics | None  # of the request at hand; None where it could not even begin
    tokens_per_s: float  # lately
    nodes: int  # verified for it lately
    history: tuple[float, ...]  # tokens per second, second by second
    kept: int  # of its finished requests, those that met their target
    judged: int  # those that had one
    error: str | None
    version: int  # changes with the wish

    @property
    def is_active(self) -> bool:
        return self.state in ("waiting", "writing")


class Stream:
    """A user who asks again when an answer is finished, if ``is_simulated``."""

    def __init__(self, name: str, wants: str, wish: Wish, is_simulated: bool, to_text: ToText, version: int):
        self.name, self.wants, self.wish, self.is_simulated = name, wants, wish, is_simulated
        self.version = version
        self._to_text = to_text
        self._handle: RequestHandle | None = None
        self._text = HighlightedText(to_text)
        self._past: deque[Gain] = deque()  # of requests before the one at hand
        self._kept = self._judged = 0
        self._is_counted = True
        self._ended_s: float | None = None
        self._error: str | None = None
        self._is_stopped = False

    def begin(self, submit: Submit, now_s: float) -> None:
        """Ask, once more or for the first time. What cannot be submitted shows as this stream's error, and raises."""
        self.end(now_s)
        self._text, self._handle, self._error, self._is_stopped = HighlightedText(self._to_text), None, None, False
        try:
            self._handle = submit(self.wish)
        except Exception as error:
            self._error = _words(error)
            raise
        self._is_counted, self._ended_s = False, None

    def end(self, now_s: float) -> None:
        """Stop writing; what is there stays."""
        if self._handle is not None:
            self._handle.cancel()
            self._past.extend(gains(self._handle.commits))
        while self._past and self._past[0].at_s < now_s - HISTORY_S:
            self._past.popleft()
        self._is_stopped = True

    def forget_record(self) -> None:
        """How often targets were met is counted anew, without the request at hand."""
        self._kept = self._judged = 0
        self._is_counted = True

    @property
    def state(self) -> State:
        handle = self._handle
        if self._error is not None:
            return "failed"
        if self._is_stopped or handle is None:
            return "stopped"
        if handle.done():
            return {"error": "failed", "cancelled": "stopped"}.get(str(handle.request.finish_reason), "finished")
        return "writing" if handle.commits else "waiting"

    def is_due(self, now_s: float) -> bool:
        """Whether a simulated user has read what it got and asks again."""
        self._count(now_s)
        return self.is_simulated and self.state == "finished" and now_s - (self._ended_s or now_s) >= PAUSE_S

    def _count(self, now_s: float) -> None:
        """Take note of an end."""
        if self._ended_s is None and self._handle is not None and self._handle.done():
            self._ended_s = now_s
            attained = self._handle.metrics.attained
            if not self._is_counted and self.state == "finished" and attained is not None:
                self._kept, self._judged = self._kept + attained, self._judged + 1
            self._is_counted = True

    @property
    def record(self) -> tuple[int, int]:
        return self._kept, self._judged

    def view(self, now_s: float) -> View:
        self._count(now_s)
        handle, own, begun_s = self._handle, list(self._past), now_s
        pieces: list[Piece] = []
        if handle is not None:
            commits = handle.commits
            own += [] if self._is_stopped else gains(commits)
            begun_s = own[0].at_s if self._past and own else (commits[0].at_s if commits else now_s)
            pieces = self._text.take(handle.token_ids, handle.from_draft)
        return View(
            name=self.name,
            wants=self.wants,
            state=self.state,
            wish=self.wish,
            pieces=tuple(pieces),
            metrics=None if handle is None else handle.metrics,
            tokens_per_s=tokens_per_s(own, now_s, begun_s),
            nodes=sum(gain.nodes for gain in recent(own, now_s)),
            history=tuple(history(own, now_s)),
            kept=self._kept,
            judged=self._judged,
            error=self._error or _error_of(handle),
            version=self.version,
        )


def _error_of(handle: RequestHandle | None) -> str | None:
    error: Any = None if handle is None or not handle.done() else handle.request.error
    return None if error is None or isinstance(error, RequestCancelledError) else _words(error)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
