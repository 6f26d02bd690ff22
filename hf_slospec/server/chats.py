"""Request bodies of chats: messages with images, tools, and the choice of tools."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hf_slospec.errors import InvalidInputError
from hf_slospec.server.bodies import ClosedModel, SamplingBody, SamplingSettings

if TYPE_CHECKING:
    from hf_slospec.server.answers import Answer, AnswerForm

# `call_schema` adds empty `properties` to a JSON schema that has no other keywords than these.
OF_ANY_OBJECT = {"$id", "$schema", "type", "title", "description", "required"}
TEMPLATE_ADDS = (
    "add_special_tokens must be false for messages, whose special tokens the chat template writes"
)
DATA_URL = re.compile("data:image/[^,]*;base64,")


def check_data_url(url: str) -> str:
    """Return the URL of an image; raise ValueError if it is not a data URL in base64."""
    if not DATA_URL.match(url):
        raise ValueError(
            "must be a data URL, data:image/png;base64,...; images are not fetched from elsewhere, "
            f"got {url[:40]!r}"
        )
    return url


def decode_image(url: str, take_pixels: Callable[[int], None]) -> Any:
    """Return the image of a data URL as a PIL image in RGB.

    Args:
        take_pixels: gets the number of pixels before they are decompressed, and raises
            InvalidInputError if they are too many; a small file may decompress to gigabytes.

    Raises:
        InvalidInputError: the URL holds no image, or Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidInputError("image_url needs Pillow here: pip install pillow") from error
    try:
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True)))
        take_pixels(image.width * image.height)
        return image.convert("RGB")
    except InvalidInputError:
        raise
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InvalidInputError(
            f"image_url.url cannot be read as an image: {error}; send a format that Pillow reads, "
            "such as PNG, in base64"
        ) from error


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
    """A message of a chat. Any other fields that a client sends go to the chat template."""

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

    def for_template(self, take_pixels: Callable[[int], None]) -> dict[str, Any]:
        """Return the message as chat templates expect it; ``take_pixels`` as in
        :func:`decode_image`.

        Raises:
            InvalidInputError: an image cannot be read, or is too large.
        """
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            fields["content"] = [
                {"type": "text", "text": part.text} if isinstance(part, Text)
                else {"type": "image", "image": decode_image(part.image_url.url, take_pixels)}
                for part in self.content
            ]  # fmt: skip
        fields.pop("cache_control", None)
        if (calls := fields.get("tool_calls")) == []:
            del fields["tool_calls"]
        elif isinstance(calls, list):  # templates want arguments as a mapping
            fields["tool_calls"] = [_with_arguments(call) for call in calls]
        return fields


def _function_of(tool: Any) -> dict[str, Any]:
    """Return the field ``function`` of a tool or tool call; an empty dict if it is no object."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments parsed; unchanged if they are no text in JSON."""
    function = _function_of(call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _without_cache_control(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without ``cache_control``: it has no effect, as all prefixes are cached, and
    the chat template would show it to the model.
    """
    cleaned = {name: value for name, value in tool.items() if name != "cache_control"}
    if function := _function_of(tool):
        cleaned["function"] = _without_cache_control(function)
    return cleaned


def function_tool(**fields: Any) -> dict[str, Any]:
    """Return a tool, a ``tool_choice`` or a tool call with these fields of a function."""
    return {"type": "function", "function": fields}


def parts_of(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: a text, or the parts of another API's blocks."""
    return content if isinstance(content, str) else [each.part for each in content]


class FunctionName(ClosedModel):
    name: str


class NamedTool(ClosedModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(ClosedModel):
    """The tools that the model may call, and whether it must call one."""

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
    # Less than fits the context: the longer the maximum output, the fewer SLOs can be guaranteed.
    default_max_tokens = 4096

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
            if self.max_tokens is None:
                self.max_tokens = settings.max_new_tokens
            if self.temperature is None:
                self.temperature = 0.0 if settings.do_sample is False else settings.temperature
            for name in SamplingSettings.model_fields:
                if getattr(self, name) is None:
                    setattr(self, name, getattr(settings, name))
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template shows to the model."""
        if self.tool_choice == "none" or not self.tools:
            return None
        is_choice = isinstance(self.tool_choice, AllowedToolChoice)
        return self._chosen(self.tools) if is_choice else self.tools

    def _chosen(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools whose functions ``tool_choice`` names; all of them if it names none."""
        match self.tool_choice:
            case NamedTool(function=function):
                names = {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                names = {tool.function.name for tool in allowed.tools}
            case _:
                return tools
        chosen = [tool for tool in tools if _function_of(tool).get("name") in names]
        if missing := names - {_function_of(tool).get("name") for tool in chosen}:
            raise ValueError(
                f"tool_choice names {min(missing)!r}, which needs a function of that name among tools"
            )
        return chosen

    @property
    def max_calls(self) -> int | None:
        """Return the maximum number of tool calls of an answer; None: any number."""
        is_one = self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)
        return 1 if is_one else None

    @property
    def must_call(self) -> bool:
        """Return True if the answer must consist of tool calls."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable_functions(self) -> list[dict[str, Any]]:
        """Return the functions of the tools that may be called if ``must_call``; raises ValueError
        if there are none.
        """
        chosen = self._chosen(self.tools or [])
        functions = [_function_of(tool) for tool in chosen if "function" in tool]
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
        """Return the JSON schema of the output: of an array of tool calls if ``must_call``, else of
        ``response_format``; None for text.
        """
        if self.must_call:
            return call_schema(self.callable_functions, self.max_calls)
        return super().json_schema

    @property
    def schema_field(self) -> str:
        return "tools" if self.must_call else super().schema_field

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def call_schema(functions: list[dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """Return the JSON schema of an array of one to ``max_calls`` calls (None: any number)."""
    calls = []
    for index, function in enumerate(functions):
        # Because of the id, each `$ref` in the parameters is relative to the parameters' schema.
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
    """Request body of another API (Responses, Messages), which is translated into a chat."""

    chat_template_kwargs: dict[str, Any] | None = None

    @cached_property
    def chat(self) -> ChatBody:
        """Return the body translated into a chat; raises pydantic's ValidationError."""
        raise NotImplementedError

    def answer(self, form: Answer) -> AnswerForm:
        """Return an empty response in this API's format; ``form`` is the chat's."""
        raise NotImplementedError


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
