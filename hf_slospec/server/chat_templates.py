"""Applies chat templates to clients' messages, and refuses control tokens in texts and input that
the template would ignore.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from transformers.utils.chat_template_utils import _get_template_variables

from hf_slospec.batcher.submission import REFUSALS, in_template_form, tensors_of_one
from hf_slospec.errors import InvalidInputError
from hf_slospec.forks import Lock
from hf_slospec.server.chats import ChatBody
from hf_slospec.server.engine import ServedEngine
from hf_slospec.server.limits import RequestLimits

EFFORT = "reasoning_effort"  # name of a variable of some chat templates
# Roles of messages that are accepted where control tokens are refused or escaped
ROLES = ("assistant", "developer", "function", "system", "tool", "user")


class PromptInputs(NamedTuple):
    tokens: list[int]
    of_images: dict[str, Any] = {}  # noqa: RUF012  arguments of submit for its images; never written to


class ChatTemplates:
    """Turns clients' messages into prompts.

    In this module, ``processor`` may be a processor or a tokenizer.
    """

    def __init__(self, engine: ServedEngine, limits: RequestLimits, special_tokens: str = "allow"):
        """Create the templates of an engine.

        Args:
            special_tokens: treatment of special tokens that are written in texts of messages: they
                become control tokens ("allow"), the request is refused ("refuse"), or they stay
                plain text ("escape").
        """
        self._engine = engine
        self._limits = limits
        self._treatment = special_tokens
        # copies that escape, by id() of the processor, which lives as long as the server
        self._copies: dict[int, Any] = {}
        self._lock = Lock()

    def prompt(self, body: ChatBody) -> PromptInputs:
        """Return the prompt of a chat, made by the tokenizer's chat template, or by the processor's
        if there are images.

        Raises:
            InvalidInputError: there is no template, the template refuses messages or ignores part
                of them, texts have special tokens that are refused, or images are too large.
        """
        has_images = any(message.num_images for message in body.messages)
        processor: Any = self._engine.processor if has_images else self._engine.tokenizer
        if processor is None:
            raise InvalidInputError(
                "messages: this server takes no images (image_url); send text only"
            )
        if getattr(processor, "chat_template", None) is None:
            raise InvalidInputError(
                "the model has no chat template; use /v1/completions, or start with --chat-template"
            )
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None and EFFORT in _variables_of(processor):
            variables.setdefault(EFFORT, body.reasoning_effort)
        num_pixels = 0

        def take_pixels(number: int) -> None:
            nonlocal num_pixels
            num_pixels += number
            self._limits.check("pixels", num_pixels, "messages", "pixels of all images")

        messages = [message.for_template(take_pixels) for message in body.messages]
        _check_variables(processor, variables)
        is_continued = body.continue_final_message
        options = {
            "tools": body.shown_tools,
            "add_generation_prompt": body.add_generation_prompt and not is_continued,
            "continue_final_message": is_continued, **variables,
        }  # fmt: skip
        try:
            messages = in_template_form(processor, messages, options)
            _check_shown(processor, messages, options)
            encoded = self._encoded(processor, messages, options, has_images)
        except InvalidInputError:  # its message is complete
            raise
        except REFUSALS as error:
            raise InvalidInputError(f"messages: the chat template refused them: {error}") from error
        tensors = tensors_of_one(encoded) if has_images else {}
        ids = tensors.pop("inputs")[0].tolist() if has_images else encoded["input_ids"]
        if not ids:
            raise InvalidInputError(
                "messages: the chat template made no tokens of them; send a text"
            )
        return PromptInputs(ids, tensors)

    def _encoded(
        self,
        processor: Any,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        has_images: bool,
    ) -> Any:
        options = options | {"return_dict": True, "tokenize": True}
        if has_images:
            options["return_tensors"] = "pt"
        if self._treatment == "allow":
            return processor.apply_chat_template(messages, **options)
        tokenizer = getattr(processor, "tokenizer", processor)
        _check_names(tokenizer._get_control_tokens(_template_of(processor)), messages, options)
        # To escape, transformers sets a flag of the tokenizer. Other threads use the tokenizer at
        # the same time, so a copy is used.
        with self._lock:
            if id(processor) not in self._copies:
                self._copies[id(processor)] = copy.deepcopy(processor)
            escaping = self._copies[id(processor)]
            escaped = escaping.apply_chat_template(
                messages, **options, sanitize_control_tokens=True
            )
        if self._treatment == "escape":
            return escaped
        encoded = processor.apply_chat_template(messages, **options)
        added = tokenizer.added_tokens_decoder
        surplus = _token_counts(encoded) - _token_counts(escaped)
        if forged := [added[token].content for token in surplus if token in added]:
            raise InvalidInputError(
                f"messages: this server refuses special tokens in texts, which become control tokens of the chat "
                f"template; leave out {', '.join(map(repr, forged))}"
            )
        return encoded


def _token_counts(encoded: Any) -> Counter[int]:
    return Counter(torch.as_tensor(encoded["input_ids"], device="cpu").flatten().tolist())


def _variables_of(processor: Any) -> Set[str]:
    """Return the names of the variables that the processor's chat template uses."""
    names: Set[str] = _get_template_variables(_template_of(processor))
    return names


def _template_of(processor: Any) -> str:
    template: str | dict[str, str] = processor.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())


def _check_names(
    control_tokens: Sequence[str], messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Raise InvalidInputError for unknown roles, and for control tokens in names of fields, which
    transformers does not escape.
    """
    for message in messages:
        if message["role"] not in ROLES:
            raise InvalidInputError(
                f"messages: role must be one of {', '.join(ROLES)}, got {message['role']!r}"
            )
    for name in _names([messages, options]):
        for token in control_tokens:
            if token in name:
                raise InvalidInputError(
                    f"messages: this server refuses the special token {token!r} in names of fields"
                )


def _names(value: Any) -> Iterator[str]:
    """Yield the names of all fields in a JSON value, at every depth."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _names(each)


def _check_variables(processor: Any, variables: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for variables that the template does not use, or that have the name
    of an argument of ``apply_chat_template``.
    """
    taken = inspect.signature(processor.apply_chat_template).parameters
    names = _variables_of(processor)
    if refused := [name for name in variables if name in taken or name not in names]:
        available = ", ".join(sorted(names - {*taken, "messages"})) or "none"
        raise InvalidInputError(
            f"chat_template_kwargs: {', '.join(refused)} cannot be given; only variables of the chat template's own "
            f"can: {available}"
        )


def _check_shown(
    processor: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]
) -> None:
    """Raise InvalidInputError if the template ignores tools or tool calls, so that it renders the
    same text without them.
    """

    def text(messages: list[dict[str, Any]], **changes: Any) -> str | None:
        try:
            rendered: str = processor.apply_chat_template(
                messages, **{**options, **changes}, tokenize=False
            )
        except REFUSALS:  # as when other messages need what was left out
            return None
        return rendered

    without_calls = [
        {name: message[name] for name in message if name != "tool_calls"} for message in messages
    ]
    if options["tools"] and text(messages) == text(messages, tools=None) is not None:
        raise InvalidInputError(
            "tools: the chat template does not show them to the model; leave them out, or start with a --chat-template "
            "that does"
        )
    if without_calls != messages and text(messages) == text(without_calls) is not None:
        raise InvalidInputError(
            "messages: the chat template does not show tool_calls to the model; leave them out"
        )
