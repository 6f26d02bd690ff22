"""Limits of one request, and the checks of bodies against them."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ConfigDict, Field

from hf_slospec.errors import InputModel, InvalidInputError
from hf_slospec.server.bodies import CompletionBody, DetokenizeBody, SamplingBody
from hf_slospec.server.chats import ChatBody, Message, TokenizeBody
from hf_slospec.server.work import Work

# Maximum UTF-8 bytes of a prompt per token that fits; few texts have so many bytes per token
BYTES_PER_TOKEN = 16
LEAST_PROMPT_BYTES = 2**16  # the default limit of a prompt's bytes is at least this
# Error code. Messages have it, too: OpenAI's client since 3.0 shows users the message only
CONTEXT_CODE = "context_length_exceeded"
# JSON strings, which are emptied before commas and brackets are counted
STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')


class LimitError(InvalidInputError):
    """A request asks for more than the limit named ``limit`` allows."""

    def __init__(self, limit: str, message: str):
        super().__init__(message)
        self.limit = limit


class ContextOverflowError(LimitError):
    """A prompt is too long, alone or with its output. The messages have OpenAI's and Anthropic's
    wording, by which clients recognise the error.
    """

    def __init__(
        self,
        limit: str,
        field: str,
        max_len: int,
        length: str,
        for_anthropic: str,
        or_shorten: str = "",
    ):
        """Create the error.

        Args:
            limit: name of the limit.
            field: field of the body that has the prompt.
            max_len: tokens that fit.
            length: clause of OpenAI's message that says how long the prompt is.
            for_anthropic: the same in Anthropic's message.
            or_shorten: what else the client may reduce.
        """
        super().__init__(
            limit,
            f"This model's maximum context length is {max_len} tokens. However, {length}. "
            f"Please reduce the length of the {field}{or_shorten}. ({CONTEXT_CODE})",
        )
        self.field = field
        self.for_anthropic = f"prompt is too long: {for_anthropic}"

    @classmethod
    def of_tokens(
        cls, field: str, max_len: int, prompt_len: int, max_tokens: int
    ) -> ContextOverflowError:
        """Return the error for a prompt whose output may have ``max_tokens``."""
        if prompt_len > max_len:
            length = f"your {field} resulted in {prompt_len} tokens"
            return cls(
                "context", field, max_len, length, f"{prompt_len} tokens > {max_len} maximum"
            )
        total = prompt_len + max_tokens
        length = f"you requested {total} tokens ({prompt_len} in the {field}, {max_tokens} in the completion)"
        for_anthropic = (
            f"input length and `max_tokens` exceed context limit: {prompt_len} + {max_tokens} > {max_len}, "
            "decrease input length or `max_tokens` and try again"
        )
        return cls("context", field, max_len, length, for_anthropic, " or max_tokens")


class RequestLimits(InputModel):
    """Limits of one request, and of the work that is done for requests before the engine takes
    them.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    body_bytes: int = Field(2**23, ge=1024)
    json_values: int = Field(2**20, ge=64, description="Values in a body.")
    json_containers: int = Field(
        2**16, ge=16, description="Arrays and objects in a body, which take most memory."
    )
    prompts: int = Field(128, ge=1, description="Prompts of a completion.")
    choices: int = Field(128, ge=1, description="n times the prompts.")
    prompt_bytes: int | None = Field(
        None,
        ge=1,
        description="UTF-8 bytes of a prompt, or of messages with tools. None: 16 per token that fits.",
    )
    stop_strings: int = Field(32, ge=0)
    stop_chars: int = Field(256, ge=1, description="Characters of a stop string.")
    stop_token_ids: int = Field(256, ge=0)
    logit_bias: int = Field(1024, ge=0, description="Tokens with a bias.")
    salt_chars: int = Field(256, ge=0, description="Characters of cache_salt.")
    top_logprobs: int = Field(20, ge=0)
    schema_bytes: int = Field(2**16, ge=2, description="JSON schema of the output, or of calls.")
    schema_s: int = Field(2, ge=1, description="Processor seconds to compile a schema.")
    schema_memory_bytes: int = Field(2**28, ge=2**25, description="Memory to compile a schema.")
    images: int = Field(32, ge=0, description="Images of a request.")
    pixels: int = Field(2**25, ge=1, description="Pixels of all images of a request.")
    workers: int = Field(4, ge=1, description="Threads for tokenizing, images and submitting.")
    waiting: int = Field(
        256, ge=1, description="Jobs that wait for one of these threads, of all clients."
    )
    reader_s: float = Field(
        60.0, gt=0, description="Seconds after which a client that reads nothing is cut."
    )

    def new_work(self) -> Work:
        """Return the thread pool in which a server prepares requests."""
        return Work(self.workers, self.waiting)

    def check(self, limit: str, number: float, field: str, unit: str) -> None:
        """Raise LimitError if ``number`` is above a limit; the message names field and unit."""
        maximum = getattr(self, limit)
        if number > maximum:
            raise LimitError(
                limit, f"{field}: {number:.0f} {unit}, and this server takes at most {maximum:.0f}"
            )

    def check_json(self, content: bytes) -> None:
        """Raise LimitError for JSON with so many values or containers that parsing it would take
        far more memory than its bytes.
        """
        if (
            _num_values(content) > self.json_values
            or _num_containers(content) > self.json_containers
        ):
            content = STRINGS.sub(b'""', content)
        self.check("json_values", _num_values(content), "the body", "values")
        self.check("json_containers", _num_containers(content), "the body", "arrays and objects")

    def check_prompt(self, prompt: str, max_len: int, field: str = "prompt") -> None:
        """Raise LimitError for a text that is too long to be tokenized; ``max_len`` tokens fit."""
        max_bytes = self.prompt_bytes or max(BYTES_PER_TOKEN * max_len, LEAST_PROMPT_BYTES)
        number = len(prompt)
        if number <= max_bytes:  # far longer texts are not encoded
            number = len(prompt.encode(errors="replace"))
        if number > max_bytes:
            length = f"{field} has {number} bytes, and this server takes at most {max_bytes}"
            raise ContextOverflowError("prompt_bytes", field, max_len, f"your {length}", length)

    def check_body(self, body: Any, max_len: int) -> None:
        """Raise LimitError if a validated body asks for more than a limit allows. The pixels of
        images are checked later, by :func:`decode_image`.
        """
        if isinstance(body, SamplingBody):
            self._check_sampling(body)
        if isinstance(body, CompletionBody):
            self.check("prompts", len(body.prompts), "prompt", "prompts")
            self.check("choices", body.n * len(body.prompts), "n", "choices of all prompts")
            self._check_logprobs(body, "logprobs")
            for prompt in body.prompts:
                if isinstance(prompt, str):
                    self.check_prompt(prompt, max_len)
        elif isinstance(body, ChatBody):
            self.check("choices", body.n, "n", "choices")
            self._check_logprobs(body, "top_logprobs")
            self._check_messages(
                body.messages, [body.tools, body.chat_template_kwargs], max_len, body.prompt_field
            )
        elif isinstance(body, TokenizeBody):
            self.check_prompt(body.prompt or "", max_len)
            self._check_messages(body.messages or [], [], max_len)
        elif isinstance(body, DetokenizeBody):
            max_tokens = BYTES_PER_TOKEN * max_len
            if len(body.tokens) > max_tokens:
                text = f"tokens: {len(body.tokens)}, and this server takes at most {max_tokens}"
                raise LimitError("prompt_bytes", text)

    def _check_sampling(self, body: SamplingBody) -> None:
        schema = "" if body.json_schema is None else json.dumps(body.json_schema)
        self.check("schema_bytes", len(schema), body.schema_field, "bytes of schema")
        self.check("stop_strings", len(body.stages), "slo_tpot", "stages")
        markers = [stage.until for stage in body.stages if isinstance(stage.until, str)]
        for field, strings in (("stop", body.stop_strings), ("slo_tpot", markers)):
            longest = max(map(len, strings), default=0)
            self.check("stop_strings", len(strings), field, "strings")
            self.check("stop_chars", longest, field, "characters in one string")
        self.check("stop_token_ids", len(body.stop_token_ids or ()), "stop_token_ids", "token ids")
        self.check("logit_bias", len(body.logit_bias or ()), "logit_bias", "token ids")
        self.check("salt_chars", len(body.cache_salt), "cache_salt", "characters")

    def _check_logprobs(self, body: SamplingBody, field: str) -> None:
        self.check("top_logprobs", body.num_top_logprobs or 0, field, "tokens at each position")

    def _check_messages(
        self,
        messages: list[Message],
        tools_and_variables: list[Any],
        max_len: int,
        field: str = "messages",
    ) -> None:
        self.check("images", sum(message.num_images for message in messages), "messages", "images")
        texts = [message.without_images for message in messages]
        whole = json.dumps([texts, tools_and_variables], ensure_ascii=False)
        self.check_prompt(whole, max_len, field)


def _num_values(content: bytes) -> int:
    return content.count(b",") + content.count(b"[") + content.count(b"{") + 1


def _num_containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")
