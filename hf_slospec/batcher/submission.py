"""Conversion of the prompt of ``submit`` to token ids and tensors. ``request/params.py`` checks the
options of ``submit``.
"""

from __future__ import annotations

import html
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedOptionError,
)
from hf_slospec.model.properties import CACHE_NAMES, input_device

PROMPTED = {"add_generation_prompt": True}  # arguments of apply_chat_template
Prompt = str | Sequence[int] | torch.Tensor | Sequence[dict[str, Any]]
Chat = Sequence[dict[str, Any]]
Texts = str | Chat | Sequence[str | Chat]  # what generate takes in place of token ids
NOT_FOR_ONE = (  # arguments of generate that submit refuses: they belong to a whole batch or call
    *CACHE_NAMES,
    "assistant_model",
    "assistant_tokenizer",
    "attention_mask",
    "drafter",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
)


# Arguments of generate that contradict texts, from which they follow.
BESIDE_TEXTS = ("attention_mask", "input_ids", "inputs_embeds", "position_ids")


def check_arguments_of_one(arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that do not apply to one submitted request.

    Raises:
        InvalidTypeError: ``streamer`` has no method ``put`` or ``end``.
        UnsupportedOptionError: one of ``NOT_FOR_ONE`` was given.
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
    """Return one prompt as arguments of ``generate``; among them is ``inputs``, [1, length] int64.

    Args:
        prompt: a text, chat messages or token ids.
        images: the images of a text, in the order of their placeholders; chat messages contain
            their images.
        tokenizer: the target's; None: only token ids are accepted, or images with ``processor``.
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
    """Return the tokens of an ended request, followed by a text or token ids, as arguments of
    ``generate``; see :func:`inputs_of`.

    Raises:
        InvalidInputError, InvalidTypeError: the earlier request cannot be continued, or not with
            this prompt.
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


def has_texts(inputs: Any) -> TypeGuard[Texts]:
    """Return whether the inputs of ``generate`` are a text, chat messages, or a sequence that
    begins with one of these.
    """
    rows = inputs if isinstance(inputs, (list, tuple)) else ()
    return isinstance(inputs, str) or any(
        isinstance(row, (str, dict)) or _is_chat(row) for row in rows[:1]
    )


def inputs_of_texts(
    texts: Texts, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return texts as arguments of ``generate``: ``inputs`` and ``attention_mask``, both
    [batch, length] int64, padded on the left, or on the right for an encoder.

    Args:
        texts: a text or the messages of a chat, or several of these, one per row.
        model: the target.
        arguments: the call's other arguments, among them ``tokenizer``.

    Raises:
        InvalidInputError: there is no tokenizer, a text is empty, the model's input is no text, or
            another argument stands for the text, too.
        InvalidTypeError: a row is neither a text nor a chat.
    """
    if given := [name for name in BESIDE_TEXTS if arguments.get(name) is not None]:
        raise InvalidInputError(
            f"{', '.join(given)} cannot be given beside texts; leave it out, or pass token ids"
        )
    if (name := model.main_input_name) not in ("input_ids", "inputs_embeds"):
        raise InvalidInputError(
            f"inputs is a text, and {type(model).__name__} takes {name}; pass what its processor "
            "returns"
        )
    rows: Any = [texts] if isinstance(texts, str) or _is_chat(texts) else texts
    if not all(isinstance(row, str) or _is_chat(row) for row in rows):
        raise InvalidTypeError(
            "inputs must be a tensor of token ids, or a text or chat messages, or a list of these"
        )
    tokenizer = arguments["tokenizer"]
    ids = [torch.tensor(prompt_ids(row, tokenizer), device="cpu") for row in rows]
    pad = next(t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None)
    padded = partial(
        pad_sequence,
        batch_first=True,
        padding_side="right" if model.config.is_encoder_decoder else "left",
    )
    device = input_device(model)
    return {
        "inputs": padded(ids, padding_value=pad).to(device),
        "attention_mask": padded(list(map(torch.ones_like, ids))).to(device),
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
    """Return the token ids of a prompt: of a text, of chat messages, or of token ids in any
    container.

    Args:
        prompt: the prompt.
        tokenizer: the target's; None: only token ids are accepted.
        is_appended: the prompt continues other tokens, so a text gets no special tokens, and chat
            messages are refused.

    Raises:
        InvalidInputError: the prompt is empty, or needs a tokenizer or chat template that is
            missing.
        InvalidTypeError: the prompt has none of these types.
    """
    if isinstance(prompt, str):
        given = _tokenizer_for("a text", tokenizer)
        options = {"add_special_tokens": False} if is_appended else {}
        try:
            ids = given(prompt, **options)["input_ids"]
        except REFUSALS as error:  # e.g. the text contains half of a surrogate pair
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
    is_list = isinstance(ids, (list, tuple, range))
    wrong = [value for value in ids if not _is_token_id(value)] if is_list else []
    if not is_list or wrong:
        raise InvalidTypeError(
            "prompt must be a text, token ids of one request (such as tokenizer(text)['input_ids']), or a list of "
            f"chat messages; got {type(prompt).__name__}"
            + (f" with {reprlib.repr(wrong[0])}, which is no token id" if wrong else "")
        )
    if not len(ids):
        raise InvalidInputError("prompt is empty; give it at least one token")
    return list(map(int, ids))


def _is_token_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0


def _tokenizer_for(what: str, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    if tokenizer is None:
        raise InvalidInputError(
            f"prompt is {what}, which needs a tokenizer; give SLOSpecGenerator one, or pass token ids"
        )
    return tokenizer


# Exceptions of tokenizers, chat templates and processors for inputs that they cannot process.
REFUSALS = (
    TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RuntimeError,
)  # fmt: skip
Message = dict[str, Any]


def in_template_form(
    processor: Any, messages: Sequence[Message], options: Mapping[str, Any]
) -> list[Message]:
    """Return chat messages with their contents converted to the form (a string, or a list of parts)
    in which the chat template shows all their texts.

    The contents are tried as they are, then all as strings, then all as lists of parts; with
    images, all as lists of parts is tried first. A string joins the texts of parts by newlines, as
    vLLM does.

    Args:
        processor: a processor or a tokenizer.
        messages: the chat messages.
        options: other arguments of ``processor.apply_chat_template``.

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
    # Indices of the messages that are not shown in the first form that the template accepts.
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
    if not hidden:  # the template accepts no form; its error for this one is the clearest
        return [message if _has_others(message) else _as_string(message) for message in messages]
    role = messages[hidden[0]].get("role")
    raise InvalidInputError(
        f"messages: the chat template does not show the text of messages[{hidden[0]}], of role {role!r}, to the model; "
        "leave it out, send it with another role, or use a chat template that shows it"
    )


def _hidden(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
    """Return the indices of messages with a text that the chat template does not show.

    Templates may strip or escape a text, or leave out reasoning in it, so texts are replaced by
    marker words, which are searched for in the rendered prompt.
    """
    words: dict[str, tuple[int, str]] = {}  # marker word -> index of the message, its text

    def marked(index: int, text: str) -> str:
        word = f"qx{len(words)}xq"
        words[word] = index, text
        return word

    chat = [_with_texts(message, partial(marked, index)) for index, message in enumerate(messages)]
    try:
        rendered = _rendered(processor, chat, options)
        wanted = {word: word for word in words}
    except REFUSALS:  # the template accepts only certain texts, so look for the texts themselves
        rendered = _rendered(processor, messages, options)
        wanted = {word: text for word, (_, text) in words.items()}
    if not isinstance(rendered, str):  # the processor does not return the rendered text
        return []
    prompt = _squeezed(html.unescape(rendered))
    hidden = []
    for word, (index, original) in words.items():
        text = _squeezed(wanted[word])
        is_shown = text in prompt or not original.strip()
        is_shown &= not (_is_list(messages[index]) and _is_dumped(text, prompt))
        # Some templates, as of Llama 3.1, leave out the text of assistant messages with tool calls.
        if not is_shown and not messages[index].get("tool_calls"):
            hidden.append(index)
    return hidden


def _rendered(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
    return processor.apply_chat_template(list(messages), **{**options, "tokenize": False})


def _squeezed(text: str) -> str:
    """Remove from a text what templates may change: whitespace, case and backslashes."""
    return "".join(text.split()).casefold().replace("\\", "")


def _is_dumped(word: str, rendered: str) -> bool:
    """Return whether the template printed a list of parts as a Python or JSON literal."""
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
    """Return whether a message has parts other than texts, such as images."""
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
    """Return a copy of a message with ``change`` applied to each of its texts."""
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
