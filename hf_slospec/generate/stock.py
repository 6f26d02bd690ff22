"""Calls of stock ``generate``: up to its decoding method, or to its end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Clock
from hf_slospec.errors import InvalidInputError, UnsupportedModelError
from hf_slospec.generate.arguments import configured
from hf_slospec.generate.processors import is_stock
from hf_slospec.generate.rows import Rows, StopStrings, is_joint
from hf_slospec.model.ownership import is_of_transformers
from hf_slospec.request.request import Request
from hf_slospec.request.state import RequestState

NewStopStrings = Callable[[Any, Any], Any]  # of a tokenizer and the strings


class StockCall(NamedTuple):
    """Arguments that stock ``generate`` passes to its decoding method."""

    input_ids: torch.Tensor  # [batch, padded_len] int64
    processors: Any
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    inputs: Any = None  # an encoder's main input, for every prompt


def generates_in_parts(model: PreTrainedModel) -> bool:
    """Return whether the class's own ``generate`` calls transformers' for one part of the output
    after another.
    """
    return isinstance(model, WhisperGenerationMixin)


def has_own_generate(model: Any) -> bool:
    """Return whether the model's class overrides ``generate``, or a library wraps it."""
    return not is_of_transformers(type(model).generate)


def run_stock(
    model: PreTrainedModel, arguments: dict[str, Any], decode: Callable[[StockCall], Any]
) -> Any:
    """Run stock ``generate`` with ``decode`` in place of its decoding method; where that returns
    None, the method's arguments are its output.
    """

    @functools.wraps(_as_decoding_method)
    def decoding_method(*args: Any, **kwargs: Any) -> Any:
        stock = _as_decoding_method(*args, **kwargs)
        output = decode(stock)
        return stock if output is None else output

    return stock_generate(model)(**arguments, custom_generate=decoding_method)


def own_generate_error(model: PreTrainedModel, what: str) -> UnsupportedModelError:
    """Return the error for a model that decodes by a ``generate`` of its own."""
    return UnsupportedModelError(
        f"{type(model).__name__} decodes by a generate of its own{what and ', '}{what}, which cannot be speculated; "
        "call generate without slo_tpot, or pass fallback=True"
    )


def stock_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the model class's own ``generate``, bound to the model, whatever replaced it on the
    instance.

    One that does not name ``inputs`` takes them as its first argument.
    """
    model_class: Any = type(model)
    method: Callable[..., Any] = model_class.generate.__get__(model)
    if is_of_transformers(method) or "inputs" in signature(method).parameters:
        return method

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        first = [kwargs.pop("inputs")] if "inputs" in kwargs and not args else args
        return method(*first, **kwargs)

    return generate


def foreign_generate(generate: Any) -> Any:
    """Return the ``generate`` of a model instance, or the one under ours, if it is someone else's;
    otherwise None.

    One with an attribute ``speculates`` hands its arguments to a :class:`SLOSpecGenerator`.
    """
    generate = getattr(generate, "replaced", generate)
    is_ours = getattr(getattr(generate, "func", generate), "speculates", False)
    return None if is_ours or is_of_transformers(generate) else generate


def _as_decoding_method(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Any = None,
    **model_kwargs: Any,  # not by name: transformers would take them from the caller's arguments
) -> StockCall:
    """Return the prepared inputs; stock ``generate`` calls this in place of its decoding method."""
    return StockCall(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        inputs_tensor,
    )


def arguments_for_stock(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    new_stop_strings: NewStopStrings = StopStrings,
) -> dict[str, Any]:
    """Return the arguments without those that stock would drop, refuse or misread."""
    # With drafts, stock would choose assisted decoding, which takes only one row.
    kept = without_drafts(model, arguments)
    for name in ("streamer", "labels"):
        kept.pop(name, None)
    for name in ("inputs", "input_ids"):
        if isinstance(ids := kept.get(name), torch.Tensor) and ids.ndim == 1:
            kept[name] = ids[None]
            if isinstance(mask := kept.get("attention_mask"), torch.Tensor) and mask.ndim == 1:
                kept["attention_mask"] = mask[None]
    strings = configured("stop_strings", model, kept)
    tokenizer = kept.get("tokenizer")
    if strings is not None and tokenizer is not None:  # else stock says what is missing
        try:
            criterion = new_stop_strings(tokenizer, strings)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidInputError(
                f"stop_strings must be strings that the tokenizer can write, got {strings!r}: {error}"
            ) from error
        kept["stopping_criteria"] = StoppingCriteriaList(
            [*(kept.get("stopping_criteria") or []), criterion]
        )
        kept = _without(model, kept, "stop_strings")
    return kept


def without_drafts(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments for stock, without those that make it draft, which it can for one
    row only.
    """
    dropped = {"assistant_model", "assistant_tokenizer"}
    if arguments.get("tokenizer") is None:  # a generate of the model's own may not know it
        dropped.add("tokenizer")
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    if generates_in_parts(model) and "inputs" in kept:
        # Whisper's generate takes them by the encoder's name only
        kept[model.main_input_name] = kept.pop("inputs")
    return _without(model, kept, "prompt_lookup_num_tokens")


def _without(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a call's arguments without a setting, which is also turned off in the configs."""
    kept = {key: value for key, value in arguments.items() if key != name}
    if getattr(config := kept.get("generation_config"), name, None) is not None:
        kept["generation_config"] = copy.copy(config)
        setattr(kept["generation_config"], name, None)
    return kept if getattr(model.generation_config, name, None) is None else kept | {name: None}


def batch_level_names(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, num_rows: int
) -> list[str]:
    """Return the names of processors and criteria that are not known to treat each row by itself.

    Those of transformers do, and joint criteria are known. A user's declare it by an attribute
    ``per_row = True``; without it they may tell rows apart, end all of them together or count their
    calls, and stock calls them once per step with the whole batch.
    """
    users = [each for each in (*processors, *criteria) if not is_stock(each)]
    return [
        type(each).__name__
        for each in users
        if not getattr(each, "per_row", False) and not is_joint(each, num_rows)
    ]


def run_stock_loop(
    model: PreTrainedModel,
    rows: Rows,
    clock: Clock,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """Decode with stock's loop, one token of every row at a time, and record the times on the
    requests.
    """
    rows.begin()
    watch = _TokenTimes(clock)
    loop: Any = type(model)
    output = loop._sample(
        model,
        rows.input_ids,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([*criteria, watch]),
        generation_config=config,
        streamer=rows.streamer,
        **model_kwargs,
    )
    sequences = getattr(output, "sequences", output)[:, rows.input_ids.shape[1] :].tolist()
    for request, new in zip(rows.requests, sequences, strict=True):
        _record(request, new[: rows.length_of(new)], watch.times_s)
    return output


def _record(request: Request, new: list[int], times_s: list[float]) -> None:
    for token, now_s in zip(new, times_s, strict=False):
        request.tokens.append(token)
        request.record_step(0, 0, 1.0, PhaseTimes(), now_s)
    request.state = RequestState.STOP if request.num_left > 0 else RequestState.LENGTH


class _TokenTimes(StoppingCriteria):
    """Criterion that never stops, and records when each step's tokens were chosen."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.times_s = list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
