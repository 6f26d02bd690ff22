"""Options and prompt of a submitted request, checked before it is queued."""

from __future__ import annotations

import html
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedOptionError,
)
from hf_slospec.model.properties import CACHE_NAMES

PROMPTED = {"add_generation_prompt": True}  # options of apply_chat_template
Prompt = str | Sequence[int] | torch.Tensor | Sequence[dict[str, Any]]
NOT_FOR_ONE = (  # arguments of generate that do not apply to the tokens of a single request
    *CACHE_NAMES,
    "assistant_model",
    "assistant_tokenizer",
    "attention_mask",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
)


def check_arguments_of_one(arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that do not apply to one submitted request.

    Raises:
        InvalidTypeError, UnsupportedOptionError: the message names the argument.
    """
    if (streamer := arguments.get("streamer")) is not None:
        for name in ("put", "end"):
            if not callable(getattr(streamer, name, None)):
                raise InvalidTypeError(
                    f"streamer must have a method {name!r}, got {type(streamer).__name__}"
                )
    if given := [
        name
        for name in NOT_FOR_ONE
        if not (arguments.get(name) is None or arguments[name] is False)
    ]:
        raise UnsupportedOptionError(
            f"{', '.join(given)} cannot be given to submit, which takes one text and returns its tokens; use generate"
        )


def inputs_of(
    prompt: Prompt,
    images: Sequence[Any] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: Any,
) -> dict[str, Any]:
    """Return the tensors of one prompt as arguments of ``generate``, ``inputs`` [1, length] int64
    among them.

    Args:
        images: the images of a text, in order; chat messages have theirs in their content.
        processor: prepares texts with images; None: images are refused.

    Raises:
        InvalidInputError, InvalidTypeError: the prompt or its images cannot be processed.
    """
    if images is None and not (_is_chat(prompt) and any(map(_has_images, prompt))):
        return {"inputs": torch.tensor([prompt_ids(prompt, tokenizer)], device="cpu")}
    if processor is None:
        raise InvalidInputError(
            "images need a processor; give SLOSpecGenerator one (processor=AutoProcessor.from_pretrained(...)), or "
            "submit token ids with the processor's tensors (pixel_values=..., ...)"
        )
    if images is not None and not isinstance(prompt, str):
        raise InvalidInputError(
            "images goes with a text that has the processor's placeholders; in chat messages, images are parts of the "
            'content: {"type": "image", "image": ...}'
        )
    messages = in_template_form(processor, list[Any](prompt), PROMPTED) if images is None else []
    try:
        if images is None:
            processed = processor.apply_chat_template(
                messages, **PROMPTED, tokenize=True, return_dict=True, return_tensors="pt"
            )
        else:
            processed = processor(text=[prompt], images=list(images), return_tensors="pt")
    except REFUSALS as error:
        raise InvalidInputError(
            f"the processor refused the prompt and its images: {error}"
        ) from error
    return tensors_of_one(processed)


def inputs_after(
    earlier: RequestHandle,
    prompt: Prompt,
    images: Sequence[Any] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """Return the tensors of an ended request's tokens with a text or token ids appended, as
    :func:`inputs_of` does.

    Raises:
        InvalidInputError, InvalidTypeError: the request cannot be continued, or not with this.
    """
    if not isinstance(earlier, RequestHandle):
        raise InvalidTypeError(
            f"continues must be the handle of a request, got {type(earlier).__name__}"
        )
    if not earlier.done():
        raise InvalidInputError(
            "continues is a request that has not ended; wait for its result(), or cancel() it"
        )
    if earlier.request.error is not None:
        raise InvalidInputError(
            f"continues is a request that failed ({earlier.request.error}); submit its prompt anew"
        )
    if images is not None or earlier.has_images:
        raise InvalidInputError(
            "continues takes texts without images; submit the whole prompt with its images"
        )
    return {
        "inputs": torch.tensor(
            [[*earlier.request.tokens, *prompt_ids(prompt, tokenizer, is_appended=True)]],
            device="cpu",
        )
    }


def tensors_of_one(processed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's output for one prompt as arguments of ``generate``."""
    inputs = {name: value for name, value in processed.items() if name != "attention_mask"}
    inputs["inputs"] = inputs.pop("input_ids")
    return inputs


def _is_chat(prompt: Any) -> TypeGuard[Sequence[dict[str, Any]]]:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, dict) for message in prompt)
    )


def _has_images(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, (list, tuple)) and any(
        isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts
    )


def prompt_ids(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, is_appended: bool = False
) -> list[int]:
    """Return the token ids of a text, of chat messages or of ids.

    Text that ``is_appended`` to other tokens gets no special tokens; chat messages cannot be
    appended.

    Raises:
        InvalidInputError: it is empty, or needs a tokenizer or chat template that is missing.
        InvalidTypeError: it is none of these.
    """
    if isinstance(prompt, str):
        given = _tokenizer_for("a text", tokenizer)
        options = {"add_special_tokens": False} if is_appended else {}
        try:
            ids = given(prompt, **options)["input_ids"]
        except REFUSALS as error:  # such as half of a surrogate pair
            raise InvalidInputError(f"the tokenizer refused the prompt: {error}") from error
    elif _is_chat(prompt):
        if is_appended:
            raise InvalidTypeError(
                "chat messages cannot be appended by continues; append a text, or submit the whole chat"
            )
        given = _tokenizer_for("chat messages", tokenizer)
        if getattr(given, "chat_template", None) is None:
            raise InvalidInputError(
                "the tokenizer has no chat template; submit a text or token ids"
            )
        messages = in_template_form(given, list[Any](prompt), PROMPTED)
        try:
            ids = given.apply_chat_template(messages, **PROMPTED, return_dict=True)["input_ids"]
        except REFUSALS as error:
            raise InvalidInputError(f"the chat template refused the messages: {error}") from error
    else:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
            ids = ids[0]
    if not isinstance(ids, (list, tuple, range)) or not all(map(_is_token_id, ids)):
        raise InvalidTypeError(
            "prompt must be a text, token ids of one request (such as tokenizer(text)['input_ids']), or a list of "
            f"chat messages; got {type(prompt).__name__}"
        )
    if not len(ids):
        raise InvalidInputError("prompt is empty; give it at least one token")
    return list(map(int, ids))


def _is_token_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _tokenizer_for(what: str, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    if tokenizer is None:
        raise InvalidInputError(
            f"prompt is {what}, which needs a tokenizer; give SLOSpecGenerator one, or submit ids"
        )
    return tokenizer


# Raised by tokenizers, chat templates and processors for inputs that they cannot process.
REFUSALS = (
    TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RuntimeError,
)  # fmt: skip
Message = dict[str, Any]


def in_template_form(
    processor: Any, messages: Sequence[Message], options: Mapping[str, Any]
) -> list[Message]:
    """Return messages whose contents have the form in which the chat template shows all their
    texts.

    Tried are the contents as they are, all as strings, and all as parts; as strings, texts of parts
    are joined by newlines, as vLLM joins them. Beside images, all as parts is tried first.

    Args:
        processor: a processor or a tokenizer.
        options: other arguments of its ``apply_chat_template``.

    Raises:
        InvalidInputError: the template leaves out a text in every form.
    """
    messages = [
        message | {"content": ""} if message.get("content") == [] else message
        for message in messages
    ]
    has_images = any(map(_has_others, messages))
    tests: list[Callable[[Message], bool]] = [
        lambda message: has_images or _is_list(message),
        _is_list,
        _has_others,
        lambda message: True,
        lambda message: message.get("role") != "system" or _has_others(message),
    ]
    # Messages whose texts the first form that the template takes does not show.
    hidden = list[int]()
    for listed in dict.fromkeys(tuple(map(test, messages)) for test in tests):
        form = [
            _as_parts(each) if is_list else _as_string(each)
            for each, is_list in zip(messages, listed, strict=True)
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

    Templates may strip or escape a text, and leave out reasoning in it, so words are rendered in
    place of the texts."""
    words: dict[str, tuple[int, str]] = {}  # by word: the message's index, and the text

    def marked(index: int, text: str) -> str:
        word = f"qx{len(words)}xq"
        words[word] = index, text
        return word

    chat = [_with_texts(message, partial(marked, index)) for index, message in enumerate(messages)]
    try:
        rendered = _rendered(processor, chat, options)
        wanted = {word: word for word in words}
    except REFUSALS:  # a template that wants texts of a certain kind
        rendered = _rendered(processor, messages, options)
        wanted = {word: text for word, (_, text) in words.items()}
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
    return (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    )


def _has_others(message: Message) -> bool:
    """Return True if a message has parts that are no texts, such as images."""
    return _is_list(message) and not all(map(_is_text, message["content"]))


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    return (
        message | {"content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


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
        "content": [
            part | {"text": change(part["text"])} if _is_text(part) else part
            for part in message["content"]
        ]
    }
