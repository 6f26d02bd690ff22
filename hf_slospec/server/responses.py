"""OpenAI's Responses API: its bodies, translated into chats, and its answers and events. Nothing is
stored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from hf_slospec.server.answers import Answer, BlockAnswer, Events, named_event, whole_usage
from hf_slospec.server.bodies import ClosedModel, CommonBody
from hf_slospec.server.chats import ChatBody, ForeignBody, check_data_url
from hf_slospec.server.choices import Choice, Piece

# Types of parts, and of their events, by kind of block.
TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}
LOGPROBS = "message.output_text.logprobs"
ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}

# Fields of a request that its response repeats, with their values where they are left out.
ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "metadata": {}, "user": None,
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
    "temperature": None, "top_p": None, "truncation": "disabled", "top_logprobs": 0,
}  # fmt: skip


class InputText(ClosedModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # ignored, as are logprobs: the model does not read them
    logprobs: list[Any] | None = None

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class InputImage(ClosedModel):
    type: Literal["input_image"]
    image_url: Annotated[str, AfterValidator(check_data_url)]
    detail: Literal["auto", "low", "high"] = "auto"

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}


InputParts = Annotated[
    list[Annotated[InputText | InputImage, Field(discriminator="type")]], Field(fail_fast=True)
]


def _parts(content: str | list[InputText | InputImage]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [each.part for each in content]


class _Item(ClosedModel):
    id: str | None = None  # ignored, as is the status: nothing is stored
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts
    # Ignored: chat templates do not tell phases apart
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": _parts(self.content)}


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @property
    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {
            "role": "assistant",
            "tool_calls": [{"id": self.call_id, "type": "function", "function": function}],
        }


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _parts(self.output)}


class ReasoningText(ClosedModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] = Field(
        default_factory=list
    )  # this server makes none
    encrypted_content: None = None

    @property
    def message(self) -> dict[str, Any]:
        return {
            "role": "assistant",
            "reasoning_content": "".join(each.text for each in self.content or ()),
        }


def _type_of(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


class FunctionTool(ClosedModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(ClosedModel):
    type: Literal["function"]
    name: str

    @property
    def of_chat(self) -> dict[str, Any]:
        """Return it as a tool of a chat's ``tool_choice``."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(ClosedModel):
    """The functions that the model may call, and whether it must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True)]


class TextFormat(ClosedModel):
    """Format of the output: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type} | ({"json_schema": schema} if schema else {})


class TextOptions(ClosedModel):
    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(ClosedModel):
    effort: str | None = Field(
        None, description="The chat template's variable reasoning_effort, if it has it."
    )
    summary: Literal["auto"] | None = None  # none is made


class InputChat(ChatBody):
    prompt_field = "input"


class ResponsesBody(CommonBody, ForeignBody):
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: no items are dropped, either
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )
    top_logprobs: int | None = Field(None, ge=0)
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None  # ignored, as in chats

    @field_validator("store")
    @classmethod
    def _check_store(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("this server stores no responses; leave it out, or send false")
        return value

    @field_validator("previous_response_id")
    @classmethod
    def _check_previous(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("this server stores no responses; send the earlier items as input")
        return value

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ResponsesBody:
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"top_logprobs has no effect without include of {LOGPROBS}")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Return True if the output's texts have log probabilities."""
        return LOGPROBS in (self.include or ())

    @cached_property
    def chat(self) -> ChatBody:
        fields: dict[str, Any] = self.common | {
            "messages": self._messages(),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.tools or self.tool_choice != "auto":
            functions = [
                tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools
            ]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
            fields["tool_choice"] = self._tool_choice()
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return InputChat.model_validate(fields)

    def answer(self, form: Answer) -> ResponseAnswer:
        return ResponseAnswer(self, form)

    def _tool_choice(self) -> str | dict[str, Any]:
        match self.tool_choice:
            case NamedFunction() as function:
                return function.of_chat
            case AllowedFunctions(mode=mode, tools=functions):
                allowed = {"mode": mode, "tools": [function.of_chat for function in functions]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
            case choice:
                return choice

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat; reasoning, text and calls of one turn become one
        message.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            message = item.message
            last = messages[-1] if messages else {}
            if (
                message["role"] != "assistant"
                or last.get("role") != "assistant"
                or "reasoning_content" in message
            ):
                messages.append(message)
            elif "tool_calls" in message:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            elif "content" in last or "tool_calls" in last:
                messages.append(message)
            else:
                last["content"] = message["content"]
        return messages


class ResponseAnswer(BlockAnswer):
    def __init__(self, body: ResponsesBody, chat: Answer):
        super().__init__(chat.model, f"resp_{uuid.uuid4().hex}")
        self._request = body
        self._created_s = int(time.time())
        self._number = 0
        self._chat = chat
        self.wants_logprobs = chat.wants_logprobs
        self._logprobs = list[dict[str, Any]]()  # of the last text
        self._num_sent = 0  # of these, that events have sent

    def begin(self, choices: Sequence[Choice]) -> str:
        response = self._response("in_progress")
        return "".join(
            named_event(self._numbered(f"response.{kind}", response=response))
            for kind in ("created", "in_progress")
        )

    def end(self, choices: Sequence[Choice]) -> str:
        response = self.body(choices)
        return named_event(self._numbered(f"response.{response['status']}", response=response))

    def failed(self, error: dict[str, Any], choices: Sequence[Choice]) -> str:
        message, code = (
            error["error"]["message"],
            ERROR_CODES.get(error["error"]["type"], "server_error"),
        )
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return named_event(self._numbered("response.failed", response=response))

    def chunk(self, piece: Piece, choices: Sequence[Choice], is_first: bool) -> str:
        if self.wants_logprobs:
            added = self._chat.token_logprobs(piece)
            if (
                piece.parts.reasoning or piece.parts.tool_calls
            ):  # leave out the tokens before those of the text
                lengths = accumulate(len(each["token"]) for each in reversed(added))
                num_text = sum(length <= len(piece.parts.content) for length in lengths)
                added = added[len(added) - num_text :]
            self._logprobs += added
        return super().chunk(piece, choices, is_first)

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        usage = whole_usage(choices)
        response = self._response("incomplete" if self._is_cut else "completed")
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "metrics": usage["metrics"],
        }
        return response

    @property
    def _is_cut(self) -> bool:
        return self.finish_reason == "length"

    def _response(self, status: str) -> dict[str, Any]:
        names = {*ECHOED, "tools", "tool_choice"}
        echoed = self._request.model_dump(by_alias=True, exclude_none=True, include=names)
        return {
            "id": self.id, "object": "response", "created_at": self._created_s, "model": self.model,
            "status": status, "error": None, "incomplete_details": None, "output": list(self.blocks),
            "store": False, "previous_response_id": None, "background": False, "usage": None,
        } | ECHOED | echoed  # fmt: skip

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        index = len(self.blocks) - 1
        return self._numbered(kind, item_id=self.blocks[index]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item's only part."""
        return self._of_item(kind, content_index=0, **fields)

    def _added_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(item)
        return self._numbered(
            "response.output_item.added", output_index=len(self.blocks) - 1, item=item
        )

    def _done_item(self, **fields: Any) -> dict[str, Any]:
        self.blocks[-1] |= fields
        return self._numbered(
            "response.output_item.done", output_index=len(self.blocks) - 1, item=self.blocks[-1]
        )

    def opened(self, kind: str) -> Events:
        if kind == "reasoning":
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": []}
        else:
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        yield self._added_item(item | {"status": "in_progress", "content": []})
        self._text = ""
        yield self._of_part("response.content_part.added", part=self._part(kind, is_empty=True))

    def extended(self, kind: str, text: str) -> Events:
        self._text += text
        fields: dict[str, Any] = {}
        if kind == "text":
            fields["logprobs"], self._num_sent = (
                self._logprobs[self._num_sent :],
                len(self._logprobs),
            )
        yield self._of_part(f"response.{TEXTS[kind]}.delta", delta=text, **fields)

    def closed(self, kind: str) -> Events:
        part = self._part(kind)
        fields = {"logprobs": part["logprobs"]} if kind == "text" else {}
        yield self._of_part(f"response.{TEXTS[kind]}.done", text=self._text, **fields)
        yield self._of_part("response.content_part.done", part=part)
        yield self._done_item(status="incomplete" if self._is_cut else "completed", content=[part])
        if kind == "text":
            self._logprobs = []
            self._num_sent = 0

    def called(self, id: str, name: str, arguments: str) -> Events:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": id,
            "name": name,
        }
        yield self._added_item(item | {"arguments": "", "status": "in_progress"})
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        yield self._done_item(status="completed", arguments=arguments)

    def _part(self, kind: str, is_empty: bool = False) -> dict[str, Any]:
        """Return the only part of the last item, with the text so far."""
        part: dict[str, Any] = {"type": TEXTS[kind], "text": "" if is_empty else self._text}
        if kind == "text":  # reasoning has no log probabilities
            part |= {"annotations": [], "logprobs": [] if is_empty else self._logprobs}
        return part
