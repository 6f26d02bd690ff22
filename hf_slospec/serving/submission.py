"""Options and prompt of a submitted request, checked before it is queued."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from transformers import PreTrainedTokenizerBase

from hf_slospec.engine.request import LEAST_SLO_S, Progress
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedOptionError,
    describe_validation_error,
)
from hf_slospec.models.inspection.cache_names import CACHE_NAMES
from hf_slospec.serving.chat_contents import REFUSALS, in_template_form
from hf_slospec.serving.handle import RequestHandle

PROMPTED = {"add_generation_prompt": True}  # options of apply_chat_template
Prompt = str | Sequence[int] | torch.Tensor | Sequence[dict[str, Any]]
IMPOSSIBLE = "impossible"  # type and range are right, and the value contradicts itself or others
WRONG_VALUE = ("greater_than", "less_than", "finite", IMPOSSIBLE)  # pydantic's error types that are no type errors
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


MAX_VALUE = 100  # as larger ones would let an admission decision tell too many sums apart


class SubmitOptions(BaseModel):
    """Options of ``submit`` beside those of ``generate``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    slo_ttft: float | None = Field(None, ge=LEAST_SLO_S)  # seconds
    slo_e2e: float | None = Field(None, ge=LEAST_SLO_S)  # seconds
    priority: int = 0
    value: int = Field(1, ge=1, le=MAX_VALUE)
    best_effort: bool = False
    speculative: bool = True
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=0, lt=2**64)
    block: bool = False
    timeout: float | None = Field(None, ge=0)  # seconds
    cache_salt: str = ""
    must_guarantee: bool = False
    resume: Progress | None = None
    logprobs: int | None = Field(None, ge=0)  # most probable tokens at each position, beside the token itself
    prompt_logprobs: int | None = Field(None, ge=0)  # the same for the prompt's positions

    @field_validator("slo_ttft", "slo_e2e", "timeout", mode="before")
    @classmethod
    def _is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a bool is no number of seconds")
        return float(value) if isinstance(value, numbers.Real) else value  # numpy scalars

    @model_validator(mode="after")
    def _fit_together(self) -> SubmitOptions:
        if self.must_guarantee and self.best_effort:
            raise PydanticCustomError(IMPOSSIBLE, "must_guarantee and best_effort exclude each other; leave one out")
        if self.slo_e2e is not None and self.slo_ttft is not None and self.slo_e2e <= self.slo_ttft:
            raise PydanticCustomError(
                IMPOSSIBLE,
                "slo_e2e is the time to the last token and must be longer than slo_ttft, that to the first, got "
                "{slo_e2e} and {slo_ttft} s; leave one out",
                {"slo_e2e": self.slo_e2e, "slo_ttft": self.slo_ttft},
            )
        return self

    @field_validator("resume")
    @classmethod
    def _is_sound(cls, progress: Progress | None) -> Progress | None:
        if progress is not None:
            if not all(type(token) is int and token >= 0 for token in progress.tokens):
                raise PydanticCustomError(IMPOSSIBLE, "its tokens must be token ids; pass handle.progress")
            if not 0 <= progress.decoding_s <= progress.elapsed_s < math.inf:
                raise PydanticCustomError(IMPOSSIBLE, "its seconds must be finite, 0 <= decoding_s <= elapsed_s")
        return progress

    @classmethod
    def of(cls, **values: Any) -> SubmitOptions:
        """Return validated options.

        Raises:
            InvalidTypeError, InvalidInputError: the message names the option, the problem and the value.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            is_value = error.errors()[0]["type"].startswith(WRONG_VALUE)
            kind = InvalidInputError if is_value else InvalidTypeError
            raise kind(describe_validation_error(error)) from error


def check_arguments_of_one(arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that do not apply to one submitted request.

    Raises:
        InvalidTypeError, UnsupportedOptionError: the message names the argument.
    """
    if (streamer := arguments.get("streamer")) is not None:
        for name in ("put", "end"):
            if not callable(getattr(streamer, name, None)):
                raise InvalidTypeError(f"streamer must have a method {name!r}, got {type(streamer).__name__}")
    if given := [name for name in NOT_FOR_ONE if not (arguments.get(name) is None or arguments[name] is False)]:
        raise UnsupportedOptionError(
            f"{', '.join(given)} cannot be given to submit, which takes one text and returns its tokens; use generate"
        )


def inputs_of(
    prompt: Prompt, images: Sequence[Any] | None, tokenizer: PreTrainedTokenizerBase | None, processor: Any
) -> dict[str, Any]:
    """Return the tensors of one prompt as arguments of ``generate``, ``inputs`` [1, length] int64 among them.

    Args:
        images: the images of a text, in order; chat messages have theirs in their content.
        processor: prepares texts with images; None: images are refused.

    Raises:
        InvalidInputError, InvalidTypeError: the prompt or its images cannot be processed.
    """
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, dict) for message in prompt)
    if images is None and not (is_chat and any(map(_has_images, prompt))):
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
        raise InvalidInputError(f"the processor refused the prompt and its images: {error}") from error
    return tensors_of_one(processed)


def inputs_after(
    earlier: RequestHandle, prompt: Prompt, images: Sequence[Any] | None, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Return the tensors of an ended request's tokens with a text or token ids appended, as :func:`inputs_of` does.

    Raises:
        InvalidInputError, InvalidTypeError: the request cannot be continued, or not with this.
    """
    if not isinstance(earlier, RequestHandle):
        raise InvalidTypeError(f"continues must be the handle of a request, got {type(earlier).__name__}")
    if not earlier.done():
        raise InvalidInputError("continues is a request that has not ended; wait for its result(), or cancel() it")
    if earlier.request.error is not None:
        raise InvalidInputError(f"continues is a request that failed ({earlier.request.error}); submit its prompt anew")
    if images is not None or earlier.has_images:
        raise InvalidInputError("continues takes texts without images; submit the whole prompt with its images")
    return {
        "inputs": torch.tensor(
            [[*earlier.request.tokens, *prompt_ids(prompt, tokenizer, is_appended=True)]], device="cpu"
        )
    }


def tensors_of_one(processed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's output for one prompt as arguments of ``generate``."""
    inputs = {name: value for name, value in processed.items() if name not in ("input_ids", "attention_mask")}
    return inputs | {"inputs": processed["input_ids"]}


def _has_images(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, (list, tuple)) and any(
        isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts
    )


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, is_appended: bool = False) -> list[int]:
    """Return the token ids of a text, of chat messages or of ids.

    Text that ``is_appended`` to other tokens gets no special tokens; chat messages cannot be appended.

    Raises:
        InvalidInputError: it is empty, or needs a tokenizer or chat template that is missing.
        InvalidTypeError: it is none of these.
    """
    if isinstance(prompt, str):
        given = _tokenizer_for("a text", tokenizer)
        try:
            ids = given(prompt, add_special_tokens=False)["input_ids"] if is_appended else given(prompt)["input_ids"]
        except REFUSALS as error:  # such as half of a surrogate pair
            raise InvalidInputError(f"the tokenizer refused the prompt: {error}") from error
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, dict) for message in prompt):
        if is_appended:
            raise InvalidTypeError(
                "chat messages cannot be appended by continues; append a text, or submit the whole chat"
            )
        given = _tokenizer_for("chat messages", tokenizer)
        if getattr(given, "chat_template", None) is None:
            raise InvalidInputError("the tokenizer has no chat template; submit a text or token ids")
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
        raise InvalidInputError(f"prompt is {what}, which needs a tokenizer; give SLOSpecGenerator one, or submit ids")
    return tokenizer
