"""Chat templates applied to messages of clients, with checks for control tokens and for input that
is ignored.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from transformers.utils.chat_template_utils import _get_template_variables

from hf_slospec.batcher.submission import REFUSALS, in_template_form
from hf_slospec.errors import InvalidInputError
from hf_slospec.forks import Lock

ROLES = ("assistant", "developer", "function", "system", "tool", "user")


class ChatTemplates:
    """Applies chat templates to messages of clients.

    In this module ``processor`` is a processor or a tokenizer.
    """

    def __init__(self, special_tokens: str = "allow"):
        """``special_tokens`` in texts of messages become control tokens (allow), are refused, or
        stay text (escape).
        """
        self._treatment = special_tokens
        self._copies: dict[
            int, Any
        ] = {}  # by id() of the processor, which lives as long as the server
        self._lock = Lock()

    def apply(
        self,
        processor: Any,
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
            variables: values of variables of the template.

        Raises:
            InvalidInputError: the template ignores part of the input, or a text has special tokens,
                which are refused.
        """
        _check_variables(processor, variables)
        options = {
            "tools": tools, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, **variables,
        }  # fmt: skip
        messages = in_template_form(processor, messages, options)
        _check_shown(processor, messages, options)
        if self._treatment == "allow":
            return processor.apply_chat_template(messages, **options, **form)
        tokenizer = getattr(processor, "tokenizer", processor)
        _check_names(tokenizer._get_control_tokens(_template_of(processor)), messages, options)
        # To escape, transformers sets a flag of the tokenizer, which other threads use at the same
        # time: copy it.
        with self._lock:
            if id(processor) not in self._copies:
                self._copies[id(processor)] = copy.deepcopy(processor)
            escaping = self._copies[id(processor)]
            escaped = escaping.apply_chat_template(
                messages, **options, **form, sanitize_control_tokens=True
            )
        if self._treatment == "escape":
            return escaped
        encoded = processor.apply_chat_template(messages, **options, **form)
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


def template_variables(processor: Any) -> Set[str]:
    """Return the names of the variables that a chat template uses."""
    names: Set[str] = _get_template_variables(_template_of(processor))
    return names


def _template_of(processor: Any) -> str:
    template: str | dict[str, str] = processor.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())


def _check_names(
    control_tokens: Sequence[str], messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Check roles and names of fields, which transformers does not escape."""
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
    """Yield the names of all fields in a value of JSON."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _names(each)


def _check_variables(processor: Any, variables: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for variables that the template does not use, or that are arguments
    of its call.
    """
    taken = inspect.signature(processor.apply_chat_template).parameters
    known = template_variables(processor)
    if refused := [name for name in variables if name in taken or name not in known]:
        available = ", ".join(sorted(known - {*taken, "messages"})) or "none"
        raise InvalidInputError(
            f"chat_template_kwargs: {', '.join(refused)} cannot be given; only variables of the chat template's own "
            f"can: {available}"
        )


def _check_shown(
    processor: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]
) -> None:
    """Raise InvalidInputError if the template ignores tools or tool calls: its text is the same
    without them.
    """

    def text(messages: list[dict[str, Any]], **changes: Any) -> str | None:
        try:
            rendered: str = processor.apply_chat_template(
                messages, **{**options, **changes}, tokenize=False
            )
        except REFUSALS:  # other messages may refer to what was left out
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
