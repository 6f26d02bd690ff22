"""The choices of a request (``n`` outputs per prompt), streamed as pieces of text while they are
decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_slospec.batcher.texts import INVALID, StoppedText, TextStream, ToText
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.server.engine import Decoding
from hf_slospec.server.tool_calls import AnswerParts, Parser, PlainParts


@dataclass(frozen=True)
class Piece:
    """Part of a choice's output, from one or several decode steps."""

    index: int  # the choice's index in the answer
    text: str
    tokens: list[int]
    # one per token, None for a prompt's first token; empty unless requested
    logprobs: list[TokenLogprobs | None]
    finish_reason: str | None = None  # None before the last piece
    # the text, split into content, reasoning and tool calls
    parts: AnswerParts = field(default_factory=AnswerParts)
    # per token: number of characters before it; empty unless requested
    offsets: list[int] = field(default_factory=list)

    def joined(self, after: Piece) -> Piece:
        return replace(
            after,
            text=self.text + after.text,
            tokens=self.tokens + after.tokens,
            logprobs=self.logprobs + after.logprobs,
            parts=self.parts + after.parts,
            offsets=self.offsets + after.offsets,
        )


@dataclass
class Choice:
    """One choice: its decoding in the engine, and the options for turning its tokens into text."""

    index: int
    decoding: Decoding
    prompt: list[int]
    to_text: ToText
    in_pool: Callable[..., Awaitable[Any]]  # calls a function with its arguments in the thread pool
    stop_strings: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()  # left out of the text if the output ends with one
    keeps_stop: bool = False  # the text includes the stop string or stop token
    echoes: bool = False  # the output begins with the prompt
    is_prompt_only: bool = False  # leave out the output: only the prompt is scored
    parser: Parser = field(default_factory=PlainParts)
    wants_offsets: bool = False
    min_tokens: int = 0  # stop strings that end within so many first tokens are ignored
    tokens: list[int] = field(default_factory=list)
    num_reasoning: int = 0  # tokens of the pieces that have reasoning
    stop_string: str | None = None  # the stop string that ended the output

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the output as it is committed; the last piece has a finish reason."""
        needs_prompt = self.echoes
        offsets = (
            _Offsets(self.to_text, () if self.echoes else self.prompt)
            if self.wants_offsets
            else None
        )
        text = StoppedText(
            self.to_text, self.stop_strings, self.keeps_stop, self.prompt, self.min_tokens
        )
        async for new, is_last in self.decoding.asteps():
            if needs_prompt:
                yield await self.in_pool(self._echoed, offsets)
                needs_prompt = False
            if self.is_prompt_only:
                new = []
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
            if reason is not None and self.is_prompt_only:
                reason = "length"
            elif reason == "stop" and self.parser.num_calls:
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

    def _echoed(self, offsets: _Offsets | None) -> Piece:
        of_prompt = [] if offsets is None else offsets.of(self.prompt)
        text = self.to_text(self.prompt).rstrip(INVALID)  # the output may complete the character
        scores = list(self.decoding.prompt_logprobs)
        return Piece(self.index, text, self.prompt, scores, offsets=of_prompt)


class _Offsets:
    """Computes at which character offset of a growing text each token begins. All tokens that are
    part of one character get the offset of that character.
    """

    def __init__(self, to_text: ToText, prompt: Sequence[int]):
        self._stream = TextStream(to_text, prompt)
        self._length = 0  # number of characters so far that no further token changes

    def of(self, tokens: Sequence[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._length + len(self._stream.held.rstrip(INVALID)))
            self._length += len(self._stream.push([token], False))
        return offsets


async def merged(choices: Sequence[Choice]) -> AsyncIterator[Piece]:
    """Yield the pieces of all choices as they arrive; at the end, cancel unfinished choices.

    A consumer that is slow gets larger pieces: tokens are buffered, and decoded into a piece when
    the consumer asks for one.
    """
    if len(choices) == 1:  # without tasks, which would cost most of the time
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
