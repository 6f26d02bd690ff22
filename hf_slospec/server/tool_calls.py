"""Parsers of the model's output: they split a chat's answer into content, reasoning and tool calls,
by the model's response template. Messages of requests are in ``chats.py``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from hf_slospec.server.chats import function_tool

# Names that response templates use for the field with reasoning
REASONING = ("reasoning_content", "reasoning", "thinking")
TOOL_CALLS = "tool_calls"


@dataclass
class AnswerParts:
    """Part of an answer, split into content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    # in the format of OpenAI's streams
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __add__(self, after: AnswerParts) -> AnswerParts:
        calls = self.tool_calls + after.tool_calls
        return AnswerParts(self.content + after.content, self.reasoning + after.reasoning, calls)


class PlainParts:
    """Parser for a model without a response template: all text is content."""

    num_calls = 0  # tool calls so far

    def push(self, text: str, is_last: bool) -> AnswerParts:
        return AnswerParts(text)


class CallParts:
    """Parser for an answer that must be a JSON array of tool calls."""

    def __init__(self) -> None:
        # number of complete calls, and the text after the last of them
        self.num_calls = 0
        self._pending = ""

    def push(self, text: str, is_last: bool) -> AnswerParts:
        """Return the tool calls that ``text`` completes. At the end, the text of an incomplete call
        is returned as content.
        """
        parts = AnswerParts()
        decoder = json.JSONDecoder()
        self._pending += text
        while "}" in text:  # other text completes no call
            self._pending = self._pending.lstrip("[, \n\t")
            try:
                call, end = decoder.raw_decode(self._pending)
            except (ValueError, RecursionError):  # not complete yet
                break
            self._pending = self._pending[end:]
            parts.tool_calls.append(_call(self.num_calls, call))
            self.num_calls += 1
        if is_last and (rest := self._pending.lstrip("[, \n\t")).startswith("{"):
            parts.content = rest
        return parts


class TemplateParts:
    """Parser for a model with a response template; wraps transformers' incremental parser."""

    def __init__(
        self,
        template: dict[str, Any],
        prefix: str,
        tools: Sequence[dict[str, Any]] | None = None,
        max_calls: int | None = None,
    ):
        """Create a parser.

        Args:
            prefix: text of the prompt, which may open a region of the template, such as reasoning.
            tools: tools of the request, whose schemas give the types of arguments.
            max_calls: maximum number of tool calls; further ones are dropped. None: no maximum.
        """
        self._max_calls = max_calls
        self._parser: ResponseParser | None = ResponseParser(
            template, prefix=prefix, tools=list(tools or ())
        )
        self.num_calls = 0
        self._has_content = False
        self._in_call = False
        self._pending = ""  # text since the last parsed region or delimiter

    def push(self, text: str, is_last: bool) -> AnswerParts:
        """Return the parts that ``text`` completes. A tool call that cannot be parsed becomes
        content, unchanged.

        Whitespace before the content is removed: templates put it between reasoning or tool calls
        and the content.
        """
        parts = AnswerParts()
        # character by character, so that the result does not depend on how the text is split
        for index, char in enumerate(text):
            if not self._feed(char, parts):
                parts.content += text[index + 1 :]
                break
        if is_last:
            self._feed(None, parts)
        if not self._has_content:
            parts.content = parts.content.lstrip()
            self._has_content = bool(parts.content)
        return parts

    def _feed(self, char: str | None, parts: AnswerParts) -> bool:
        """Add what a character, or the end of the text (None), completes to ``parts``; return False
        if the text cannot be parsed.
        """
        if self._parser is None:
            parts.content += char or ""
            return False
        self._pending += char or ""
        try:
            events = self._parser.finalize()[1] if char is None else self._parser.feed(char)
            self._take(events, parts)
        except (ValueError, TypeError, LookupError, AttributeError):
            # the template cannot parse what the model wrote: the rest is content
            parts.content += self._pending
            self._parser = None
            return False
        if not self._in_call:
            # possibly the beginning of a delimiter
            self._pending = self._parser._buffer[self._parser._pos :]
        return True

    def _take(self, events: Sequence[dict[str, Any]], parts: AnswerParts) -> None:
        for event in events:
            kind = event["type"]
            name = event["field"]
            if name == TOOL_CALLS:
                self._in_call = kind != "region_close"
                if not self._in_call:
                    value = event["value"]
                    values = value if isinstance(value, list) else [value]
                    calls = [
                        _call(index, each["function"])
                        for index, each in enumerate(values, self.num_calls)
                        if self._max_calls is None or index < self._max_calls
                    ]
                    parts.tool_calls += calls
                    self.num_calls += len(calls)
            elif kind == "region_chunk":
                self._pending = self._pending.removeprefix(event["text"])
                if name in REASONING:
                    parts.reasoning += event["text"]
                else:
                    parts.content += event["text"]


def _call(index: int, parsed: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in the format of OpenAI's streams, with its arguments as JSON text."""
    arguments = parsed.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call = function_tool(name=str(parsed["name"]), arguments=text)
    return {"index": index, "id": f"call_{uuid.uuid4().hex}"} | call


Parser = PlainParts | CallParts | TemplateParts


def response_template(model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Return the tokenizer's response template, else the one that transformers' server has for the
    model type, else None.
    """
    from transformers.cli.serving.utils import get_response_template

    template: dict[str, Any] | None = get_response_template(tokenizer, model)
    return template
