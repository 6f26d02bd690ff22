"""Parts of a chat's answer: content, reasoning and tool calls, told apart by the model's response template."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

REASONING = ("reasoning_content", "reasoning", "thinking")  # names in response templates
TOOL_CALLS = "tool_calls"


@dataclass
class Parts:
    """A stretch of an answer, told apart."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # as in a stream of OpenAI's

    def __add__(self, after: Parts) -> Parts:
        calls = self.tool_calls + after.tool_calls
        return Parts(self.content + after.content, self.reasoning + after.reasoning, calls)


class PlainParts:
    """Text of a model without a response template: all of it is content."""

    num_calls = 0  # tool calls so far

    def push(self, text: str, is_last: bool) -> Parts:
        """Return the parts of more text."""
        return Parts(text)


class TemplateParts:
    """Text of a model with a response template, parsed by transformers as it grows."""

    def __init__(self, template: dict[str, Any], prefix: str, tools: Sequence[dict[str, Any]] | None = None):
        """``prefix`` is the text of the prompt, which may begin the answer; ``tools`` give the types of arguments."""
        self._parser: ResponseParser | None = ResponseParser(template, prefix=prefix, tools=list(tools or ()))
        self.num_calls, self._has_content = 0, False
        self._in_call, self._behind = False, ""  # text behind the last that was told apart

    def push(self, text: str, is_last: bool) -> Parts:
        """Return the parts that more text completes. A tool call that cannot be parsed is content, as it was written.

        Whitespace before the content is left out: templates put it between reasoning or tool calls and the content.
        """
        found = Parts()
        for place, letter in enumerate(text):  # one by one: what is told apart does not depend on the pieces
            if not self._feed(letter, found):
                found.content += text[place + 1 :]
                break
        if is_last:
            self._feed(None, found)
        if not self._has_content:
            found.content = found.content.lstrip()
            self._has_content = bool(found.content)
        return found

    def _feed(self, letter: str | None, found: Parts) -> bool:
        """Add the parts that a letter, or the end, completes; return False if it cannot be parsed, which is content."""
        if self._parser is None:
            found.content += letter or ""
            return False
        self._behind += letter or ""
        try:
            events = self._parser.finalize()[1] if letter is None else self._parser.feed(letter)
            self._take(events, found)
        except (ValueError, TypeError, LookupError, AttributeError):  # of what the model wrote
            found.content += self._behind
            self._parser = None
            return False
        if not self._in_call:
            self._behind = self._parser._buffer[self._parser._pos :]  # what may be the beginning of a delimiter
        return True

    def _take(self, events: Sequence[dict[str, Any]], found: Parts) -> None:
        for event in events:
            kind, name = event["type"], event["field"]
            if name == TOOL_CALLS:
                self._in_call = kind != "region_close"
                if not self._in_call:
                    values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                    for function in [_function(value["function"]) for value in values]:
                        call = {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
                        found.tool_calls.append(call | {"function": function})
                        self.num_calls += 1
            elif kind == "region_chunk":
                self._behind = self._behind.removeprefix(event["text"])
                if name in REASONING:
                    found.reasoning += event["text"]
                else:
                    found.content += event["text"]


def _function(parsed: dict[str, Any]) -> dict[str, str]:
    """Return a function's name and its arguments as a text."""
    arguments = parsed.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": str(parsed["name"]), "arguments": text}


def response_template(model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Return the response template of a tokenizer, or else the one transformers' server has for this kind of model."""
    from transformers.cli.serving.utils import get_response_template

    found: dict[str, Any] | None = get_response_template(tokenizer, model)
    return found
