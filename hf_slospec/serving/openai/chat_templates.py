"""Texts of clients in chat templates: whether they become control tokens, and whether the template shows them."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.utils.chat_template_utils import _get_template_variables

from hf_slospec.errors import InvalidInputError
from hf_slospec.serving.submission import REFUSALS

ROLES = ("assistant", "developer", "function", "system", "tool", "user")


class ChatTemplates:
    """Application of chat templates to what clients send.

    ``maker`` is a tokenizer or a processor everywhere.
    """

    def __init__(self, special_tokens: str = "allow"):
        """``special_tokens`` of texts become control tokens (allow), are refused, or stay text (escape)."""
        self._treatment = special_tokens
        self._copies: dict[int, Any] = {}  # by the identity of the maker, which lives as long as the server
        self._lock = threading.Lock()

    def apply(
        self,
        maker: Any,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **form: Any,
    ) -> Any:
        """Return the tokens of messages, in the form of ``apply_chat_template``.

        Args:
            variables: of the template.

        Raises:
            InvalidInputError: the template drops what was given, or texts have special tokens that are refused.
        """
        _check_variables(maker, variables)
        options = {
            "tools": tools, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, **variables,
        }  # fmt: skip
        _check_shown(maker, messages, options)
        if self._treatment == "allow":
            return maker.apply_chat_template(messages, **options, **form)
        tokenizer = getattr(maker, "tokenizer", maker)
        _check_names(tokenizer._get_control_tokens(_template_of(maker)), messages, options)
        with self._lock:  # to make text of tokens, transformers sets a switch of the tokenizer, which others use, too
            if id(maker) not in self._copies:
                self._copies[id(maker)] = copy.deepcopy(maker)
            own = self._copies[id(maker)]
            escaped = own.apply_chat_template(messages, **options, **form, sanitize_control_tokens=True)
        if self._treatment == "escape":
            return escaped
        found = maker.apply_chat_template(messages, **options, **form)
        added = tokenizer.added_tokens_decoder
        if forged := [added[token].content for token in _counts(found) - _counts(escaped) if token in added]:
            raise InvalidInputError(
                f"messages: this server refuses special tokens in texts, which become control tokens of the chat "
                f"template; leave out {', '.join(map(repr, forged))}"
            )
        return found


def _counts(found: Any) -> Counter[int]:
    return Counter(torch.as_tensor(found["input_ids"]).flatten().tolist())


def _template_of(maker: Any) -> str:
    template: str | dict[str, str] = maker.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())


def _check_names(control_tokens: Sequence[str], messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Check what transformers does not keep from becoming control tokens: roles, and names of fields."""
    for message in messages:
        if message["role"] not in ROLES:
            raise InvalidInputError(f"messages: role must be one of {', '.join(ROLES)}, got {message['role']!r}")
    for name in _names([messages, options]):
        for token in control_tokens:
            if token in name:
                raise InvalidInputError(f"messages: this server refuses the special token {token!r} in names of fields")


def _names(value: Any) -> Iterator[str]:
    """Yield the names of all fields in a value of JSON."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _names(each)


def _check_variables(maker: Any, given: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if variables for the template are none of its own."""
    taken, known = inspect.signature(maker.apply_chat_template).parameters, _get_template_variables(_template_of(maker))
    if refused := [name for name in given if name in taken or name not in known]:
        own = ", ".join(sorted(known - {*taken, "messages"})) or "none"
        raise InvalidInputError(
            f"chat_template_kwargs: {', '.join(refused)} cannot be given; only variables of the chat template's own "
            f"can: {own}"
        )


def _check_shown(maker: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if the template drops tools, or calls of tools."""

    def text(messages: list[dict[str, Any]], **others: Any) -> str | None:
        try:
            found: str = maker.apply_chat_template(messages, **{**options, **others}, tokenize=False)
        except REFUSALS:  # without what the other messages refer to
            return None
        return found

    without_calls = [{name: message[name] for name in message if name != "tool_calls"} for message in messages]
    if options["tools"] and text(messages) == text(messages, tools=None) is not None:
        raise InvalidInputError(
            "tools: the chat template does not show them to the model; leave them out, or start with a --chat-template "
            "that does"
        )
    if without_calls != messages and text(messages) == text(without_calls) is not None:
        raise InvalidInputError("messages: the chat template does not show tool_calls to the model; leave them out")
