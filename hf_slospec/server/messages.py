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
        self._unwritten = ""  # text behind the last that was told apart: delimiters, a tool call that is not complete

    def push(self, text: str, is_last: bool) -> Parts:
        """Return the parts that more text completes. A tool call that cannot be parsed is content, as it was written.

        Whitespace before the content is left out: templates put it between reasoning or tool calls and the content.
        """
        self._unwritten += text
        found = Parts(text)
        if self._parser is not None:
            try:
                events = self._parser.feed(text)
                if is_last:
                    events += self._parser.finalize()[1]
                found = self._taken(events)
            except (ValueError, TypeError, LookupError, AttributeError):  # of what the model wrote
                self._parser, found = None, Parts(self._unwritten)
        if not self._has_content:
            found.content = found.content.lstrip()
            self._has_content = bool(found.content)
        return found

    def _taken(self, events: Sequence[dict[str, Any]]) -> Parts:
        found, calls, written = Parts(), list[dict[str, Any]](), ""
        for event in events:
            kind, name = event["type"], event["field"]
            if name == TOOL_CALLS and kind == "region_close":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                calls += [_function(value["function"]) for value in values]
            elif name != TOOL_CALLS and kind == "region_chunk":
                written = event["text"]
                if name in REASONING:
                    found.reasoning += written
                else:
                    found.content += written
        if written:
            self._unwritten = self._unwritten[self._unwritten.rfind(written) + len(written) :]
        elif calls:
            self._unwritten = ""
        for function in calls:
            found.tool_calls.append(
                {"index": self.num_calls, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            )
            self.num_calls += 1
        return found


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
