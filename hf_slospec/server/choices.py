"""Choices of a request, streamed as pieces of text while they are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_slospec.batcher.texts import INVALID, StoppedText, TextStream, ToText
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.state import FinishReason
from hf_slospec.server.engine import Decoding
from hf_slospec.server.messages import Parser, Parts, PlainParts


@dataclass(frozen=True)
class Piece:
    """Output that one or several steps add to a choice."""

    index: int  # the choice's index in the answer
    text: str
    tokens: list[int]
    logprobs: list[
        TokenLogprobs | None
    ]  # one per token, empty unless requested; None for a prompt's first token
    finish_reason: str | None = None  # None before the last piece
    parts: Parts = field(
        default_factory=Parts
    )  # the text, split into content, reasoning and tool calls
    offsets: list[int] = field(
        default_factory=list
    )  # characters before each token; empty unless wanted

    def joined(self, after: Piece) -> Piece:
        return replace(
            after,
            text=self.text + after.text,
            tokens=self.tokens + after.tokens,
            logprobs=self.logprobs + after.logprobs,
            parts=self.parts + after.parts,
            offsets=self.offsets + after.offsets,
        )


class PromptOnly:
    """Decoding of a request with ``max_tokens`` 0, which at most scores its prompt."""

    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = "length"

    def __init__(self, prompt: list[int], scoring: Decoding | None):
        """``scoring`` computes the log probabilities of the prompt; None if they are not wanted."""
        self._scoring = scoring
        self._metrics = Request(0, RequestParams(prompt, 0)).metrics()

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None]:
        return [] if self._scoring is None else self._scoring.prompt_logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self._metrics if self._scoring is None else self._scoring.metrics

    @property
    def replica(self) -> str | None:
        return None if self._scoring is None else self._scoring.replica

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        """Yield one empty step, the last, after the prompt has been scored."""
        if self._scoring is not None:
            async for _ in self._scoring.asteps():
                pass
        yield [], True

    def cancel(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()


@dataclass
class Echo:
    """The prompt as the beginning of outputs. All choices of a prompt share it, and the first
    computes its scores.
    """

    # None: log probabilities are not wanted
    scores: asyncio.Future[Sequence[TokenLogprobs | None]] | None = None

    _has_first: bool = False

    def is_first(self) -> bool:
        """Return True once, if log probabilities are wanted: the first choice computes them for
        all.
        """
        is_first = self.scores is not None and not self._has_first
        self._has_first = True
        return is_first

    async def scores_by(self, decoding: Decoding) -> list[TokenLogprobs | None]:
        """Return the log probabilities of the prompt's tokens, once ``decoding`` or another
        choice's has them.
        """
        if self.scores is None:
            return []
        if not self.scores.done() and (scores := decoding.prompt_logprobs):
            self.scores.set_result(scores)
        return list(await asyncio.shield(self.scores))


@dataclass
class Choice:
    """One choice: its decoding, and the options that turn its tokens into text."""

    index: int
    decoding: Decoding
    prompt: list[int]
    to_text: ToText
    in_pool: Callable[..., Awaitable[Any]]  # calls a function with its arguments in the thread pool
    stop_strings: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()  # token ids that are not shown at the end
    keeps_stop: bool = False
    echo: Echo | None = None  # None: the output does not begin with the prompt
    parser: Parser = field(default_factory=PlainParts)
    wants_offsets: bool = False
    min_tokens: int = 0  # first tokens that complete no stop string
    tokens: list[int] = field(default_factory=list)
    num_reasoning: int = 0  # tokens of steps that wrote reasoning
    stop_string: str | None = None  # the one that ended the output

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the output as it is committed; the last piece has a finish reason."""
        echo = self.echo
        offsets = (
            _Offsets(self.to_text, self.prompt if echo is None else ())
            if self.wants_offsets
            else None
        )
        text = StoppedText(
            self.to_text, self.stop_strings, self.keeps_stop, self.prompt, self.min_tokens
        )
        async for new, is_last in self.decoding.asteps():
            if echo is not None:
                yield await self.in_pool(self._echoed, await echo.scores_by(self.decoding), offsets)
                echo = None
            begin = len(self.tokens)
            self.tokens += new
            shown = (
                new[:-1]
                if is_last and not self.keeps_stop and new and new[-1] in self.stop_tokens
                else new
            )
            added = text.push(shown, is_last)
            self.stop_string = text.stop_string
            parts = self.parser.push(added, is_last)
            self.num_reasoning += len(new) if parts.reasoning else 0
            reason = str(self.decoding.finish_reason) if is_last else None
            if reason == "stop" and self.parser.num_calls:
                reason = "tool_calls"
            if new or added or is_last:
                logprobs: list[TokenLogprobs | None] = [
                    *self.decoding.logprobs[begin : begin + len(new)]
                ]
                yield Piece(
                    self.index,
                    added,
                    new,
                    logprobs,
                    reason,
                    parts,
                    [] if offsets is None else offsets.of(new),
                )

    def _echoed(self, scores: list[TokenLogprobs | None], offsets: _Offsets | None) -> Piece:
        of_prompt = [] if offsets is None else offsets.of(self.prompt)
        text = self.to_text(self.prompt).rstrip(INVALID)  # the output may complete a character
        return Piece(self.index, text, self.prompt, scores, offsets=of_prompt)


class _Offsets:
    """Offsets, in characters, at which tokens begin in a growing text; tokens of one character
    begin where it does.
    """

    def __init__(self, to_text: ToText, prompt: Sequence[int]):
        # characters that no further token changes
        self._stream = TextStream(to_text, prompt)
        self._length = 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._length + len(self._stream.held.rstrip(INVALID)))
            self._length += len(self._stream.push([token], False))
        return offsets


async def merged(choices: Sequence[Choice]) -> AsyncIterator[Piece]:
    """Yield the pieces of all choices as they arrive; at the end, cancel choices that are not
    finished.

    A slow consumer gets larger pieces, as only tokens are buffered for it.
    """
    if len(choices) == 1:  # no tasks, which cost more than all the rest
        try:
            async for piece in choices[0].pieces():
                yield piece
        finally:
            choices[0].decoding.cancel()
        return
    waiting: dict[asyncio.Task[Piece], AsyncIterator[Piece]] = {}

    def wait_for(iterator: AsyncIterator[Piece]) -> None:
        waiting[asyncio.ensure_future(anext(iterator))] = iterator

    try:
        for choice in choices:
            wait_for(choice.pieces())
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                iterator = waiting.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                yield piece
                wait_for(iterator)
    finally:
        for task in waiting:
            task.cancel()
        for choice in choices:
            choice.decoding.cancel()
