"""Anthropic's Messages API: request bodies, translated into chats, and responses, stream events and
errors.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from hf_slospec.server.answers import Answer, BlockAnswer, Events, named_event, whole_usage
from hf_slospec.server.bodies import ClosedModel, CommonBody
from hf_slospec.server.chats import ChatBody, ForeignBody, function_tool, parts_of
from hf_slospec.server.choices import Choice

PATH = "/v1/messages"
ERROR_TYPES = {"service_unavailable_error": "overloaded_error", "internal_error": "api_error"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(ClosedModel):
    cache_control: dict[str, Any] | None = None  # ignored: all prefixes are cached


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageSource(ClosedModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Block):
    type: Literal["image"]
    source: ImageSource

    @property
    def part(self) -> dict[str, Any]:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{self.source.media_type};base64,{self.source.data}"},
        }


class ThinkingBlock(ClosedModel):
    """Reasoning of the model in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # ignored: this server signs nothing


class ToolUseBlock(_Block):
    """A tool call of the model in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        arguments = json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id} | function_tool(name=self.name, arguments=arguments)


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Shown], Field(fail_fast=True)] = ""
    is_error: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The result as a message of a chat; some chat templates read ``is_error``."""
        message = {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": parts_of(self.content),
        }
        return message | ({"is_error": True} if self.is_error else {})


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class TurnMessage(ClosedModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turn as messages of a chat: first a message for each tool result, then one with the
        other blocks.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block.message for block in self.content if isinstance(block, ToolResultBlock)]
        message: dict[str, Any] = {}
        if shown := [block for block in self.content if isinstance(block, TextBlock | ImageBlock)]:
            message["content"] = parts_of(shown)
        if thinking := [
            block.thinking for block in self.content if isinstance(block, ThinkingBlock)
        ]:
            message["reasoning_content"] = "".join(thinking)
        if calls := [block.call for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        return [*results, {"role": self.role} | message] if message or not results else results


class CustomTool(_Block):
    """A tool that the model may call, and the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # ignored: calls are sent when they are complete

    @property
    def tool(self) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, "strict": self.strict}
        set_fields = {name: value for name, value in fields.items() if value is not None}
        return function_tool(**set_fields, parameters=self.input_schema)


class ToolChoice(ClosedModel):
    """Says whether tool calls are allowed (auto), required (any) or forbidden (none)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False

    @property
    def choice(self) -> str | dict[str, Any]:
        return CHOICES[self.type]


class ToolByName(ClosedModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False

    @property
    def choice(self) -> str | dict[str, Any]:
        return function_tool(name=self.name)


class Thinking(ClosedModel):
    """Options of reasoning, which are ignored: reasoning depends on the chat template, whose
    variables can be set by ``chat_template_kwargs``.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(ClosedModel):
    """JSON schema of the output."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClosedModel):
    format: OutputFormat | None = None
    effort: str | None = Field(
        None, description="The chat template's variable reasoning_effort, if it has it."
    )


class CountTokensBody(ForeignBody):
    model: str | None = None
    messages: Annotated[list[TurnMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoice | ToolByName, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # ignored: all prefixes are cached

    @property
    def fields(self) -> dict[str, Any]:
        messages = (
            [] if self.system is None else [{"role": "system", "content": _joined(self.system)}]
        )
        messages += [message for turn in self.messages for message in turn.messages]
        fields: dict[str, Any] = {
            "messages": messages,
            "model": self.model,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": self.tools and [tool.tool for tool in self.tools],
        }
        if messages[-1]["role"] == "assistant":  # the beginning of the output
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = choice.choice
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (output := self.output_config) is not None:
            fields["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"schema": output.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    @cached_property
    def chat(self) -> ChatBody:
        return ChatBody.model_validate(self.fields)


class MessagesBody(CountTokensBody, CommonBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None

    @cached_property
    def chat(self) -> ChatBody:
        further = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return ChatBody.model_validate(self.fields | self.common | further)

    def answer(self, form: Answer) -> MessageAnswer:
        return MessageAnswer(form.model)


class MessageAnswer(BlockAnswer):
    def __init__(self, model: str):
        super().__init__(model, f"msg_{uuid.uuid4().hex}")

    def begin(self, choices: Sequence[Choice]) -> str:
        message = self.body(choices)
        return named_event({"type": "message_start", "message": message}) + named_event(
            {"type": "ping"}
        )

    def end(self, choices: Sequence[Choice]) -> str:
        body = self.body(choices)
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": body["usage"]}
        return named_event(last) + named_event({"type": "message_stop"})

    def failed(self, error: dict[str, Any], choices: Sequence[Choice]) -> str:
        return named_event(anthropic_error(error))

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        reason = self.finish_reason
        stop_string = choices[0].stop_string
        if reason is not None:
            reason = STOP_REASONS.get(
                reason, "end_turn" if stop_string is None else "stop_sequence"
            )
        usage = whole_usage(choices)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        details = usage["completion_tokens_details"]
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": self.blocks,
            "stop_reason": reason, "stop_sequence": stop_string if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": details["reasoning_tokens"]},
            } | ({} if reason is None else {"metrics": usage["metrics"]}),
        }  # fmt: skip

    def opened(self, kind: str) -> Events:
        yield self._start({"type": "thinking", "thinking": "", "signature": ""} if kind == "reasoning" else
                          {"type": "text", "text": ""})  # fmt: skip

    def extended(self, kind: str, text: str) -> Events:
        name = "thinking" if kind == "reasoning" else "text"
        self.blocks[-1][name] += text
        yield self._delta({"type": f"{name}_delta", name: text})

    def closed(self, kind: str) -> Events:
        yield self._of_block("content_block_stop")

    def called(self, id: str, name: str, arguments: str) -> Events:
        block: dict[str, Any] = {"type": "tool_use", "id": id, "name": name, "input": {}}
        yield self._start(block)
        block["input"] = _object(arguments)
        yield self._delta(
            {
                "type": "input_json_delta",
                "partial_json": json.dumps(block["input"], ensure_ascii=False),
            }
        )
        yield self._of_block("content_block_stop")

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(block)
        return self._of_block("content_block_start", content_block=block)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.blocks) - 1} | fields


def _object(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object; if the model wrote no object, return one whose
    field ``arguments`` has what it wrote.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def anthropic_error(error: dict[str, Any], status: int = 500, message: str = "") -> dict[str, Any]:
    """Return an error in Anthropic's format, converted from OpenAI's; ``message``, if not empty,
    replaces its message.
    """
    kind = error["error"]["type"]
    message = message or error["error"]["message"]
    kind = "request_too_large" if status == 413 else ERROR_TYPES.get(kind, kind)
    return {"type": "error", "error": {"type": kind, "message": message}}
