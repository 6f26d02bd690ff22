"""Request bodies of OpenAI's Responses API, translated into chats; no response is stored. Responses
and events are in ``response_events.py``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from hf_slospec.server.answers import Answer
from hf_slospec.server.bodies import ClosedModel, CommonBody
from hf_slospec.server.chats import ChatBody, ForeignBody, check_data_url, function_tool, parts_of
from hf_slospec.server.response_events import ResponseAnswer

LOGPROBS = "message.output_text.logprobs"


class InputText(ClosedModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # ignored, like logprobs, as chats have no such field
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
        return {"role": self.role, "content": parts_of(self.content)}


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @property
    def message(self) -> dict[str, Any]:
        call = function_tool(name=self.name, arguments=self.arguments)
        return {"role": "assistant", "tool_calls": [{"id": self.call_id} | call]}


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": parts_of(self.output)}


class ReasoningText(ClosedModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    # must be empty, as this server makes no summaries
    summary: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
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
        """The function in the form that a chat's ``tool_choice`` has it."""
        return function_tool(name=self.name)


class AllowedFunctions(ClosedModel):
    """The functions that the model may call, and whether it must call one."""

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
    summary: Literal["auto"] | None = None  # ignored: no summary is made


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
    truncation: Literal["auto", "disabled"] | None = None  # ignored: no items are dropped
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
        """Return True if the client asks for log probabilities of the output's text."""
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
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        if self.tools or self.tool_choice != "auto":
            fields["tools"] = [
                function_tool(**tool.model_dump(exclude={"type"}, exclude_none=True))
                for tool in self.tools
            ]
            fields["tool_choice"] = self._tool_choice()
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format
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
        """Return the chat's messages. Items of reasoning, text and tool calls of one turn of the
        model become one message.
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
