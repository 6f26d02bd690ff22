"""Contents of chat messages in the form that a chat template takes: strings, or lists of parts."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError

from hf_slospec.errors import InvalidInputError

# Raised by tokenizers, chat templates and processors for inputs that they cannot process.
REFUSALS = (
    TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RuntimeError,
)  # fmt: skip
Message = dict[str, Any]


def in_template_form(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> list[Message]:
    """Return messages whose contents have the form in which the chat template shows all their texts.

    Tried are the contents as they are, all as strings, and all as parts; as strings, texts of parts are joined by
    newlines, as vLLM joins them. Beside images, all as parts is tried first.

    Args:
        processor: a processor or a tokenizer.
        options: other arguments of its ``apply_chat_template``.

    Raises:
        InvalidInputError: the template leaves out a text in every form.
    """
    messages = [message | {"content": ""} if message.get("content") == [] else message for message in messages]
    has_images = any(map(_has_others, messages))
    tests: list[Callable[[Message], bool]] = [
        lambda message: has_images or _is_list(message),
        _is_list,
        _has_others,
        lambda message: True,
        lambda message: message.get("role") != "system" or _has_others(message),
    ]
    hidden: list[int] = []  # messages whose texts the first form that the template takes does not show
    for listed in dict.fromkeys(tuple(map(test, messages)) for test in tests):
        form = [
            _as_parts(each) if is_list else _as_string(each) for each, is_list in zip(messages, listed, strict=True)
        ]
        try:
            found = _hidden(processor, form, options)
        except REFUSALS:
            continue
        if not found:
            return form
        hidden = hidden or found
    if not hidden:  # the template takes no form, and its error for this one is the plainest
        return [message if _has_others(message) else _as_string(message) for message in messages]
    role = messages[hidden[0]].get("role")
    raise InvalidInputError(
        f"messages: the chat template does not show the text of messages[{hidden[0]}], of role {role!r}, to the model; "
        "leave it out, send it with another role, or use a chat template that shows it"
    )


def _hidden(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
    """Return the indices of messages with a text that the chat template does not show.

    Templates may strip or escape a text, and leave out reasoning in it, so words are rendered in place of the texts.
    """
    words: dict[str, tuple[int, str]] = {}  # by word: the message's index, and the text

    def marked(index: int, text: str) -> str:
        word = f"qx{len(words)}xq"
        words[word] = index, text
        return word

    chat = [_with_texts(message, partial(marked, index)) for index, message in enumerate(messages)]
    try:
        rendered, wanted = _rendered(processor, chat, options), {word: word for word in words}
    except REFUSALS:  # a template that wants texts of a certain kind
        rendered, wanted = _rendered(processor, messages, options), {word: text for word, (_, text) in words.items()}
    if not isinstance(rendered, str):  # a processor that does not say what it renders
        return []
    prompt = _squeezed(html.unescape(rendered))
    hidden = []
    for word, (index, original) in words.items():
        text = _squeezed(wanted[word])
        is_shown = text in prompt or not original.strip()
        is_shown &= not (_is_list(messages[index]) and _is_dumped(text, prompt))
        # Templates of Llama 3.1 and others leave out what an assistant says beside tool calls.
        if not is_shown and not messages[index].get("tool_calls"):
            hidden.append(index)
    return hidden


def _rendered(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
    return processor.apply_chat_template(list(messages), **{**options, "tokenize": False})


def _squeezed(text: str) -> str:
    """Return a text without what templates change: whitespace, case and backslashes."""
    return "".join(text.split()).casefold().replace("\\", "")


def _is_dumped(word: str, rendered: str) -> bool:
    """Return True if a list of parts was written as Python or JSON writes it."""
    return any(f"{quote}text{quote}:{quote}{word}" in rendered for quote in "'\"")


def _is_list(message: Message) -> bool:
    return isinstance(message.get("content"), (list, tuple))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _has_others(message: Message) -> bool:
    """Return True if a message has parts that are no texts, such as images."""
    return _is_list(message) and not all(map(_is_text, message["content"]))


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _as_string(message: Message) -> Message:
    if not _is_list(message) or _has_others(message):
        return message
    return message | {"content": "\n".join(part["text"] for part in message["content"])}


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with its texts changed."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": change(content)}
    if not _is_list(message):
        return message
    return message | {
        "content": [part | {"text": change(part["text"])} if _is_text(part) else part for part in message["content"]]
    }
