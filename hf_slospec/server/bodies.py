"""Request bodies: OpenAI's fields, vLLM's extra fields and SLOs. Unknown fields are refused by
name.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from hf_slospec.request.slo import SLOStage
from hf_slospec.server.image_urls import ImageBudget, check_data_url

if TYPE_CHECKING:
    from hf_slospec.server.answers import Answer, AnswerForm

OF_ANY_OBJECT = {
    "$id",
    "$schema",
    "type",
    "title",
    "description",
    "required",
}  # keywords that list no properties
TEMPLATE_ADDS = (
    "add_special_tokens must be false for messages, whose special tokens the chat template writes"
)
# fail_fast: the validation errors of a million items would take gigabytes.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


class ClosedModel(BaseModel):
    """Model that refuses unknown fields. Null is the same as leaving a field out, as many clients
    send it.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return (
            {name: each for name, each in value.items() if each is not None}
            if isinstance(value, dict)
            else value
        )


class StreamOptions(ClosedModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Ignored: OpenAI's padding, which hides token lengths from eavesdroppers
    include_obfuscation: bool = False


class SamplingSettings(ClosedModel):
    """Choice of tokens; what is left out has the value of the model's generation config."""

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)


class CommonBody(SamplingSettings):
    """Fields of all bodies that ask for output, whatever the API."""

    model: str | None = None
    stream: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False

    # What SLOs may be is checked by submit.
    slo_tpot: float | Annotated[list[SLOStage], Field(fail_fast=True)] | None = Field(
        None, description="Seconds per output token, or stages with SLOs of their own."
    )
    slo_ttft: float | None = Field(None, description="Seconds to the first token.")
    slo_e2e: float | None = Field(
        None, description="Seconds to the last token, of as many as max_tokens."
    )
    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="Lower is served earlier, as with vLLM."
    )
    best_effort: bool = False
    speculative: bool = Field(True, description="False: one token per step, the same output.")
    cache_salt: str = Field(
        "", description="Share K/V with requests of the same salt only, as with vLLM."
    )

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None

    @property
    def stages(self) -> list[SLOStage]:
        """Return the stages of ``slo_tpot``, none if it is a number."""
        return self.slo_tpot if isinstance(self.slo_tpot, list) else []

    @property
    def common(self) -> dict[str, Any]:
        """Return the common fields that the client gave."""
        return {
            name: getattr(self, name)
            for name in CommonBody.model_fields
            if name in self.model_fields_set
        }


class JSONSchema(ClosedModel):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # ignored: outputs always follow the schema


class ResponseFormat(ClosedModel):
    """Format of the output: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs a json_schema, and the other types take none")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class SamplingBody(CommonBody):
    """Fields of completions and chats."""

    prompt_field: ClassVar[str]  # name of the field that has the prompt

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> list[str]:
        strings = [value] if isinstance(value, str) else value or []
        if any(not string for string in strings):
            raise ValueError("a stop string must not be empty")
        return strings

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has no effect without stream")
        return self

    @model_validator(mode="after")
    def _check_schema_ends(self) -> SamplingBody:
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                f"{self.schema_field} ends the output with the JSON; leave ignore_eos and min_tokens out"
            )
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output; None for text."""
        return None if self.response_format is None else self.response_format.schema_to_follow

    @property
    def schema_field(self) -> str:
        """Return the name of the field that ``json_schema`` comes from."""
        return "response_format"

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class CompletionBody(SamplingBody):
    prompt_field = "prompt"

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    suffix: Literal[None, ""] = None

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of must equal n: completions are not ranked")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which returns nothing without echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [each for each in self.prompt if isinstance(each, str)]
        lists = [each for each in self.prompt if isinstance(each, list)]
        return [*texts, *lists] or [[each for each in self.prompt if isinstance(each, int)]]


class _Part(ClosedModel):
    cache_control: dict[str, Any] | None = None  # ignored: all prefixes are cached


class Text(_Part):
    type: Literal["text"]
    text: str


class ImageUrl(ClosedModel):
    """An image in a data URL."""

    url: Annotated[str, AfterValidator(check_data_url)]
    detail: Literal["auto", "low", "high"] = "auto"  # ignored: the processor decides


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl


class Message(BaseModel):
    """A message of a chat. Fields beside these are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        str
        | Annotated[
            list[Annotated[Text | ImagePart, Field(discriminator="type")]], Field(fail_fast=True)
        ]
        | None
    ) = None

    @property
    def num_images(self) -> int:
        """Return the number of images among the parts."""
        return (
            sum(isinstance(part, ImagePart) for part in self.content)
            if isinstance(self.content, list)
            else 0
        )

    @property
    def without_images(self) -> dict[str, Any]:
        return self.model_dump(
            exclude={"content": {"__all__": {"image_url"}}} if self.num_images else None
        )

    def for_template(self, budget: ImageBudget | None = None) -> dict[str, Any]:
        """Return the message as chat templates expect it: its text as one string, or with
        ``budget`` as it was sent.

        Raises:
            InvalidInputError: an image cannot be read, or is too large.
        """
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list) and budget is not None:
            fields["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, Text)
                else {"type": "image", "image": budget.decoded(part.image_url.url)}
                for part in self.content
            ]  # fmt: skip
        elif isinstance(self.content, list):
            fields["content"] = "\n".join(
                part.text for part in self.content if isinstance(part, Text)
            )
        fields.pop("cache_control", None)
        if (calls := fields.get("tool_calls")) == []:
            del fields["tool_calls"]
        elif isinstance(calls, list):  # templates want arguments as a mapping
            fields["tool_calls"] = [_with_arguments(call) for call in calls]
        return fields


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments parsed, or unchanged unless they are a text in JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _without_cache_control(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without marks for a cache: all prefixes are cached, and the chat template would
    show them.
    """
    kept = {name: value for name, value in tool.items() if name != "cache_control"}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = {
            name: value for name, value in function.items() if name != "cache_control"
        }
    return kept


class FunctionName(ClosedModel):
    name: str


class NamedTool(ClosedModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(ClosedModel):
    """The tools that the model may call, and whether it must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedToolChoice(ClosedModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class GenerationSettings(SamplingSettings):
    """Settings under the names of transformers, as ``transformers chat`` sends them."""

    max_new_tokens: int | None = Field(None, ge=1)
    do_sample: bool | None = None
    transformers_version: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except RecursionError:
            raise ValueError("it nests too deeply") from None
        if not isinstance(parsed, dict):
            return parsed
        return {name: each for name, each in parsed.items() if not name.startswith("_")}


class ChatBody(SamplingBody):
    prompt_field = "messages"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Annotated[dict[str, Any], AfterValidator(_without_cache_control)]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        None, description="The chat template's variable of this name, if it has it."
    )
    generation_config: GenerationSettings | None = Field(
        None, description="JSON; fields of the body take precedence."
    )

    @model_validator(mode="after")
    def _take_settings(self) -> ChatBody:
        if (settings := self.generation_config) is not None:
            if self.max_tokens is None and self.max_completion_tokens is None:
                self.max_tokens = settings.max_new_tokens
            if self.temperature is None:
                self.temperature = 0.0 if settings.do_sample is False else settings.temperature
            for name in SamplingSettings.model_fields:
                if getattr(self, name) is None:
                    setattr(self, name, getattr(settings, name))
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template shows to the model."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return (
            self._chosen(self.tools)
            if isinstance(self.tool_choice, AllowedToolChoice)
            else self.tools
        )

    def _chosen(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools whose functions ``tool_choice`` names; all of them if it names none."""
        match self.tool_choice:
            case NamedTool(function=function):
                names = {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                names = {tool.function.name for tool in allowed.tools}
            case _:
                return tools
        chosen = [tool for tool in tools if _function_name(tool) in names]
        if missing := names - {_function_name(tool) for tool in chosen}:
            raise ValueError(
                f"tool_choice names {min(missing)!r}, which needs a function of that name among tools"
            )
        return chosen

    @property
    def max_calls(self) -> int | None:
        """Return the maximum number of tool calls of an answer; None: any number."""
        return (
            1
            if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
            else None
        )

    @property
    def must_call(self) -> bool:
        """Return True if the answer must consist of tool calls."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable_functions(self) -> list[dict[str, Any]]:
        """Return the functions that an answer which must call tools may call; raises ValueError if
        there are none.
        """
        chosen = self._chosen(self.tools or [])
        functions = [tool["function"] for tool in chosen if isinstance(tool.get("function"), dict)]
        for function in functions:
            if not isinstance(function.get("name"), str) or not isinstance(
                function.get("parameters") or {}, dict
            ):
                raise ValueError(
                    "tools: a function needs a name, and an object as parameters, to be called for sure"
                )
        if not functions:
            raise ValueError("tool_choice needs a function that is among tools")
        return functions

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs")
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1")
        if self.add_special_tokens:
            raise ValueError(TEMPLATE_ADDS)
        self._chosen(self.tools or [])
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output, which is that of tool calls if there must be some;
        None for text.
        """
        if self.must_call:
            return call_schema(self.callable_functions, self.max_calls)
        return super().json_schema

    @property
    def schema_field(self) -> str:
        return "tools" if self.must_call else super().schema_field


def _function_name(tool: dict[str, Any]) -> Any:
    """Return the name of a tool's function; None if it has none."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def call_schema(functions: list[dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """Return the JSON schema of an array of at least one call of these functions."""
    calls = []
    for index, function in enumerate(functions):
        # With an id, references within the parameters are relative to the parameters.
        arguments = {"$id": f"tool:{index}", "type": "object"} | (function.get("parameters") or {})
        if not arguments.keys() - OF_ANY_OBJECT:
            arguments["properties"] = {}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return schema if max_calls is None else schema | {"maxItems": max_calls}


class ForeignBody(ClosedModel):
    """Body of another API's endpoint, which is served as a chat."""

    chat_template_kwargs: dict[str, Any] | None = None

    @cached_property
    def chat(self) -> ChatBody:
        """Return the body as one of a chat; raises pydantic's ValidationError."""
        raise NotImplementedError

    @property
    def overflow_note(self) -> str:
        """Return a sentence for the error of a prompt that is too long; empty: none."""
        return ""

    def answer(self, form: Answer) -> AnswerForm:
        """Return the form of the answer, given that of the chat."""
        raise NotImplementedError


class LoadBody(ClosedModel):
    model: str


class TokenizeBody(ClosedModel):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if (
            self.messages is not None
            and self.add_special_tokens
            and "add_special_tokens" in self.model_fields_set
        ):
            raise ValueError(TEMPLATE_ADDS)
        if self.prompt is not None and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("add_generation_prompt belongs to messages, and prompt was given")
        return self


class DetokenizeBody(ClosedModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
