"""``RequestHandle``, with which a caller streams the tokens of a submitted request and gets its
result.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import math
import numbers
import os
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from hf_slospec.batcher.texts import TextStream, ToText
from hf_slospec.engine.events import Commit
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    RequestCancelledError,
)
from hf_slospec.forks import Condition
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.request import Request
from hf_slospec.request.state import FinishReason, Progress

WAITS_FOR_ITSELF = (
    "the batcher's own thread would wait for itself: a processor, criterion or drafter waits for what the batcher does "
    "after it has returned; call generate there, or wait elsewhere"
)
# Longest timeout, in seconds, that is passed to Condition.wait_for, which adds it to the present
# time; longer ones mean no limit.
MAX_WAIT_S = threading.TIMEOUT_MAX / 2
MAX_SHOWN = 70  # characters of a text in the repr of a result


def waiting_s(timeout: Any) -> float | None:
    """Return a timeout in seconds for ``wait()``, or None to wait without limit.

    Raises:
        InvalidTypeError: ``timeout`` is neither a number nor None.
        InvalidInputError: ``timeout`` is NaN.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise InvalidTypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds):
        raise InvalidInputError("timeout must be a number of seconds or None, got nan")
    return None if seconds > MAX_WAIT_S else seconds


@dataclass(frozen=True, repr=False)
class RequestResult:
    """Output of a finished request; prints its text in short."""

    token_ids: list[int]  # new tokens only
    text: str | None  # text of the new tokens; None without a tokenizer
    finish_reason: FinishReason
    metrics: RequestMetrics

    def __repr__(self) -> str:
        size = f"{len(self.token_ids)} tokens, finish_reason {self.finish_reason!r}"
        text = "" if self.text is None else f", {textwrap.shorten(self.text, MAX_SHOWN)!r}"
        return f"<RequestResult: {size}{text}>"

    def __str__(self) -> str:
        return f"{self!r}\n{self.metrics}"

    def _repr_html_(self) -> str:
        text = "" if self.text is None else f"<p>{html.escape(self.text)}</p>"
        return text + self.metrics._repr_html_()


class RequestHandle:
    """Streams a request's output and returns its result; may be used from any thread, and awaited.

    Iterating yields parts of the text as tokens are committed, or token ids if there is no
    tokenizer. Every iteration starts from the first new token. Iteration and ``result`` raise the
    error of a failed request.
    """

    def __init__(
        self,
        request: Request,
        to_text: ToText | None,
        abort: Callable[[RequestHandle, BaseException | None], None],
        seed: int | None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs | None] = (),
    ):
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self.replica: str | None = None  # name of the replica that serves the request, if any
        self.has_images = False  # the prompt contains images, audio or video
        self.request = request
        self._to_text = to_text
        self._abort = abort
        self.seed = seed  # seed of sampling; None for greedy decoding
        self._changed = Condition()
        self._num_ready = -1  # published new tokens; -1 until the engine has taken the request
        self._traceback: TracebackType | None = None
        self._is_done = False
        self._wakers: list[Waker] = []
        self._pid = os.getpid()
        self.thread: threading.Thread | None = None  # the thread that runs the batcher

    def __repr__(self) -> str:
        state = self.finish_reason or ("waiting" if self._num_ready < 0 else "running")
        num_new = max(self._num_ready, 0)
        return f"<RequestHandle {self.request.index}: {state}, {num_new} new tokens>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.metrics._repr_html_()}"

    # ---- called by the batcher's thread

    def advance(self) -> list[Waker]:
        """Publish the tokens committed so far and wake all waiting threads. Called by the batcher.

        Returns:
            Waiting asyncio tasks, for the caller to pass to :func:`wake`.
        """
        if self.request.error is not None:
            _clear_frames(self.request.error)
            self._traceback = self.request.error.__traceback__
        with self._changed:
            self._num_ready = self.request.num_emitted
            self._is_done = self.request.is_finished
            self._changed.notify_all()
            return [waker for waker in self._wakers if self._has_more_than(waker.num_known)]

    # ---- called by the threads that submit requests

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far."""
        return self._since(0)

    @property
    def text(self) -> str | None:
        """Text so far, up to where further tokens may change it; None without a tokenizer."""
        if self._to_text is None:
            return None
        is_last = self._is_done  # read before the tokens, which it makes the last ones
        return TextStream(self._to_text).push(self.token_ids, is_last)

    def _since(self, num_known: int) -> list[int]:
        """Return the published new tokens after the first ``num_known``."""
        begin = self.request.prompt_len
        return self.request.tokens[begin + num_known : begin + max(self._num_ready, 0)]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of the new tokens so far; empty unless ``submit`` was called with
        ``logprobs``.
        """
        return list(self._logprobs[: max(self._num_ready, 0)])

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Log probabilities of the prompt's tokens, None for the first; empty before the first new
        token.

        Also empty unless ``submit`` was called with ``prompt_logprobs``.
        """
        return list(self._prompt_logprobs) if self._num_ready > 0 else []

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the request ended; None while it is unfinished."""
        return self.request.finish_reason if self._is_done else None

    @property
    def commits(self) -> list[Commit]:
        """One entry per step that committed tokens so far, with the numbers of new and of accepted
        tokens and the time.
        """
        return [
            commit
            for commit in list(self.request.stats.commits)
            if commit.num_emitted <= self._num_ready
        ]

    @property
    def from_draft(self) -> list[bool]:
        """One flag per new token so far: True if it is an accepted draft token, False if the target
        chose it after the last accepted one.
        """
        origins: list[bool] = []
        for commit in self.commits:
            num_new = commit.num_emitted - len(origins)
            origins += [index < commit.num_accepted for index in range(num_new)]
        return origins

    @property
    def metrics(self) -> RequestMetrics:
        """SLOs and measurements of the request so far."""
        return self.request.metrics()

    @property
    def progress(self) -> Progress:
        """Output so far, which another generator of the same models continues with
        ``submit(resume=...)``.
        """
        now = self.request.progress(time.perf_counter())
        return replace(now, tokens=now.tokens[: max(self._num_ready, 0)])

    def done(self) -> bool:
        """Return whether the request has finished, was cancelled or failed."""
        return self._is_done

    def cancel(self) -> None:
        """Cancel the request before the batcher's next step; does nothing if it has ended."""
        self.fail(None)

    def fail(self, error: BaseException | None) -> None:
        """End the request with an error, which ``result`` raises, before the next step; None
        cancels it. Does nothing if the request has ended.
        """
        if not self._is_done and self._pid == os.getpid():
            self._abort(self, error)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end of the request and return its output.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TimeoutError: the request has not ended; it continues, and ``result`` may be called
                again.
            RequestCancelledError: the request was cancelled; ``token_ids`` has the tokens until
                then.
        """
        limit_s = waiting_s(timeout)
        self._check_waiting()
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, limit_s):
                raise TimeoutError(f"the request was not finished within {timeout} s; it goes on")
        return self._result()

    def tokens(self) -> Iterator[int]:
        """Yield new tokens as they are committed."""
        for new, _ in self._steps():
            yield from new

    def __iter__(self) -> Iterator[str | int]:
        pieces_of = self._new_stream()
        for new, is_last in self._steps():
            yield from pieces_of(new, is_last)

    def _new_stream(self) -> Callable[[list[int], bool], Sequence[str | int]]:
        """Return a function that maps newly committed tokens to the texts (or ids) that an
        iteration yields for them.
        """
        if self._to_text is None:
            return lambda new, is_last: new
        text = TextStream(self._to_text)
        return lambda new, is_last: list(filter(None, [text.push(new, is_last)]))

    def _steps(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the newly committed tokens of each step, and whether they are the last ones."""
        num_known = 0
        is_done = False
        while not is_done:
            self._check_waiting()
            with self._changed:
                self._changed.wait_for(partial(self._has_more_than, num_known))
                new = self._since(num_known)
                is_done = self._is_done
            num_known += len(new)
            yield new, is_done
        self._raise_if_failed()

    def _has_more_than(self, num_known: float) -> bool:
        return self._is_done or self._num_ready > num_known

    # ---- for asyncio

    async def aguaranteed(self) -> bool:
        """Wait until the batcher has taken the request; return whether its SLOs are guaranteed
        then.

        Requests without ``must_guarantee`` get their guarantee later, before the next step, so this
        may return False for a request that is guaranteed afterwards.

        Raises:
            NotGuaranteedError: the request has ``must_guarantee`` and its SLOs cannot be
                guaranteed.
        """
        await self._more(-1)
        self._raise_if_failed()
        return bool(self.request.is_guaranteed)

    async def aresult(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end of the request without blocking the event loop; see :meth:`result`."""
        limit_s = waiting_s(timeout)
        try:
            await asyncio.wait_for(self._more(math.inf), limit_s)
        except TimeoutError:
            raise TimeoutError(
                f"the request was not finished within {timeout} s; it goes on"
            ) from None
        return self._result()

    def __await__(self) -> Generator[Any, None, RequestResult]:
        """Wait for the result, as :meth:`aresult` without a timeout."""
        return self.aresult().__await__()

    async def atokens(self) -> AsyncIterator[list[int]]:
        """Yield the new tokens of each step as one list."""
        async for new, _ in self.asteps():
            if new:
                yield new

    async def __aiter__(self) -> AsyncIterator[str | int]:
        pieces_of = self._new_stream()
        async for new, is_done in self.asteps():
            for piece in pieces_of(new, is_done):
                yield piece

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        """Yield the newly committed tokens of each step, and whether they are the last ones."""
        num_known = 0
        is_done = False
        while not is_done:
            await self._more(num_known)
            with self._changed:
                new = self._since(num_known)
                is_done = self._is_done
            num_known += len(new)
            yield new, is_done
        self._raise_if_failed()

    async def _more(self, num_known: float) -> None:
        """Wait until there are more than ``num_known`` new tokens, or the request has ended."""
        self._check_waiting()
        waker = Waker(num_known)
        with self._changed:
            if self._has_more_than(num_known):
                return
            self._wakers.append(waker)
        try:
            await waker.future
        finally:
            with self._changed:
                self._wakers.remove(waker)

    def _check_waiting(self) -> None:
        """Raise NotRunningError if waiting would never end: in a forked child process, and in the
        batcher's own thread.
        """
        if self._pid != os.getpid():
            raise NotRunningError(
                "the request runs in the process this one was forked from; wait for it there"
            )
        if threading.current_thread() is self.thread and not self._is_done:
            raise NotRunningError(WAITS_FOR_ITSELF)

    # ---- used by the methods for threads and for asyncio

    def _result(self) -> RequestResult:
        self._raise_if_failed()
        tokens = self.token_ids
        reason = self.request.finish_reason
        assert reason is not None
        text = None if self._to_text is None else self._to_text(tokens)
        return RequestResult(tokens, text, reason, self.metrics)

    def _raise_if_failed(self) -> None:
        if self.request.error is not None:
            raise self.request.error.with_traceback(self._traceback)
        if self.request.finish_reason == "cancelled":
            raise RequestCancelledError(f"request {self.request.index} was cancelled")


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's stack frames: they refer to the engine, which holds
    all K/V.
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame: Any = traceback.tb_frame
        while frame is not None:
            with contextlib.suppress(RuntimeError):  # a frame that is still running
                frame.clear()
            frame = frame.f_back
        traceback = traceback.tb_next


class Waker:
    """An asyncio task that waits until a request has more than ``num_known`` new tokens."""

    def __init__(self, num_known: float):
        self.num_known = num_known
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()


def wake(wakers: Iterable[Waker]) -> None:
    """Let asyncio tasks continue that wait in other threads, with one call per event loop, since
    every call may pass the GIL to the loop's thread.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Waker]] = {}
    for waker in wakers:
        by_loop.setdefault(waker.loop, []).append(waker)
    for loop, its_wakers in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            loop.call_soon_threadsafe(_resolve, its_wakers)


def _resolve(wakers: Sequence[Waker]) -> None:
    for waker in wakers:
        if not waker.future.done():
            waker.future.set_result(None)
