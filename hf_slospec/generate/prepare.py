"""Preparing a call: stock ``generate`` prepares inputs, processors and criteria; requests are made
of its rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig, StoppingCriteriaList

from hf_slospec.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError
from hf_slospec.families.encoder import EncoderInputs, decoder_inputs, generates_in_parts
from hf_slospec.generate.images import WholePrompts, names_beside_text
from hf_slospec.generate.processors import (
    draft_grammar,
    draft_processors,
    ignore_sequence,
    is_users,
    processors_of_row,
)
from hf_slospec.generate.prompt import PromptInputs
from hf_slospec.generate.rows import Rows, StopStrings
from hf_slospec.generate.speculator import Speculator
from hf_slospec.generate.validation import (
    PREPARED,
    check_arguments,
    check_cache,
    check_criteria,
    check_evaluating,
    check_forwards,
    check_options,
    check_prompts,
    configured,
    without_token_types,
)
from hf_slospec.model.coupling import Coupling
from hf_slospec.model.noise import default_generator
from hf_slospec.model.ownership import foreign_members, is_of_transformers
from hf_slospec.model.properties import FORWARD_ERRORS, given_cache
from hf_slospec.model.sampling import StockSampler
from hf_slospec.request.request import Request
from hf_slospec.request.slo import SLOTpot, parse_slo, stages_by_row

TEXT_ARGUMENTS = {*PREPARED, "input_ids", "inputs"}
NewStopStrings = Callable[[Any, Any], Any]  # of a tokenizer and the strings


class StockCall(NamedTuple):
    """Arguments that stock ``generate`` passes to its decoding method."""

    input_ids: torch.Tensor  # [batch, padded_len] int64
    processors: Any
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    inputs: Any = None  # an encoder's main input, for every prompt


@dataclass(frozen=True)
class Call:
    """A call of ``generate``, ready to be decoded."""

    rows: Rows
    stock: StockCall
    speculator: Speculator
    encoder: EncoderInputs | None = None
    # A generate of the model's class, which takes stock's output, puts the call's parts together
    is_part: bool = False
    has_images: bool = False  # the prompts hold images, audio or video

    def sampler(self, seed: int | None = None, sharing: int = 1) -> StockSampler:
        """Return the sampler of the call's rows.

        Args:
            seed: seed of the noise; None: the global generator draws it.
            sharing: number of samplers that share the memory for noise.
        """
        num_rows = len(self.rows.params)
        has_callbacks = self.rows.has_callbacks
        # Rows of a batch draw ahead of each other in any case.
        may_draw = has_callbacks and seed is None and num_rows == 1 and self.stock.config.do_sample
        return StockSampler(
            [processors_of_row(self.stock.processors, row, num_rows) for row in range(num_rows)],
            self.stock.config.do_sample,
            self.rows.input_ids.tolist(),
            self.rows.input_ids.device,
            ignore_sequence(self.stock.processors) and not may_draw,
            self.rows.record,
            seed,
            sharing,
            self.speculator.config.exact is not None,
            has_callbacks,
        )

    def noise_of(self, sampler: StockSampler, request: Request) -> Coupling | None:
        """Return the noise of a request's sampler for its drafts, if they can use it."""
        is_coupled = sampler.do_sample and self.speculator.config.coupling
        for_draft = draft_processors(sampler.processors[request.params.row]) if is_coupled else None
        return (
            None
            if for_draft is None
            else Coupling(sampler, request, for_draft, not ignore_sequence(for_draft))
        )


@torch.no_grad()
def prepare(
    speculator: Speculator,
    slo_tpot: SLOTpot,
    arguments: dict[str, Any],
    is_idle: bool = True,
    new_stop_strings: NewStopStrings = StopStrings,
) -> Call:
    """Check a call and return it as stock ``generate`` would begin to decode it.

    Args:
        arguments: those of stock ``generate``, by name.
        is_idle: see :meth:`Speculator.renew`.
        new_stop_strings: makes the criterion of ``stop_strings``.

    Raises:
        InvalidInputError, InvalidTypeError, UnsupportedOptionError, UnsupportedModelError,
        IncompatibleDraftError: the
            call cannot be speculated; nothing has been changed.
    """
    arrived_s = speculator.target.ranks.clock()
    model = speculator.target.model
    slo = _check(speculator, slo_tpot, arguments, is_idle)
    has_images = names_beside_text(
        model, {k: v for k, v in arguments.items() if k not in TEXT_ARGUMENTS}
    )
    if has_images and speculator.target.ranks.is_led:
        raise UnsupportedOptionError(
            "images, audio and video cannot be submitted to the batcher of a tensor-parallel model, as its encoder "
            "would run in one of its processes only; call generate with them in every process, while no batcher runs"
        )
    with (
        speculator.lock if has_images else contextlib.nullcontext()
    ):  # stock may forward the image encoder
        stock = _prepared(model, _for_stock(model, arguments, new_stop_strings))
    return _call(speculator, slo, arguments, arrived_s, stock)


def _prepared(model: PreTrainedModel, arguments: dict[str, Any]) -> StockCall:
    """Return what stock ``generate`` passes to its decoding method; ``arguments`` are those that it
    takes.

    Raises:
        UnsupportedModelError: a ``generate`` of the model's class does not return what the decoding
            method does.
    """
    calls = list[StockCall]()

    @functools.wraps(_as_decoding_method)
    def decoding_method(*args: Any, **kwargs: Any) -> StockCall:
        calls.append(_as_decoding_method(*args, **kwargs))
        return calls[-1]

    error: Exception | None = None
    try:
        output = stock_generate(model)(**arguments, custom_generate=decoding_method)
    except FORWARD_ERRORS as raised:
        if not calls:
            raise
        output = None
        error = raised
    if len(calls) != 1 or output is not calls[0]:
        raise _own_generate(
            model, "which changes what transformers' generate returns" if calls else ""
        ) from error
    prepared: StockCall = calls[0]
    return prepared


def _own_generate(model: PreTrainedModel, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} decodes by a generate of its own{what and ', '}{what}, which cannot be speculated; "
        "call generate without slo_tpot, or pass fallback=True"
    )


@torch.no_grad()
def generate_in_parts(
    speculator: Speculator,
    slo_tpot: SLOTpot,
    arguments: dict[str, Any],
    decode: Callable[[Call], Any],
) -> Any:
    """Run a ``generate`` that calls transformers' once per part of the output, with ``decode`` in
    its place.

    Whisper's decodes long audio in segments, and each again at higher temperatures if its text
    looks wrong. One that is not transformers' own may do anything with the output.

    Raises:
        As :func:`prepare`.
    """
    slo = _check(speculator, slo_tpot, arguments)
    model = speculator.target.model
    is_whisper = generates_in_parts(model)
    num_parts = 0
    generator = default_generator(model.device)
    state = generator.get_state()
    if is_whisper and isinstance(slo, list):
        raise UnsupportedOptionError(
            f"slo_tpot must be one for all rows of {type(model).__name__}, whose generate chooses the rows of each "
            "segment; pass a single one"
        )

    @functools.wraps(_as_decoding_method)
    def decode_part(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_parts
        num_parts += 1
        stock = _as_decoding_method(*args, **kwargs)
        return decode(
            _call(speculator, slo, arguments, speculator.target.ranks.clock(), stock, is_whisper)
        )

    output = stock_generate(model)(**_for_stock(model, arguments), custom_generate=decode_part)
    if not (num_parts or is_whisper):
        generator.set_state(state)
        raise _own_generate(model, "")
    return output


def _check(
    speculator: Speculator, slo_tpot: SLOTpot, arguments: dict[str, Any], is_idle: bool = True
) -> Any:
    """Check a call's arguments before stock sees them, renew the models, and return the parsed SLO."""
    model = speculator.target.model
    _check_generate(model)
    slo = parse_slo(configured("slo_tpot", model, arguments) if slo_tpot is None else slo_tpot)
    check_arguments(model, arguments)
    check_evaluating(model)
    speculator.renew(is_idle)
    return slo


def has_own_generate(model: Any) -> bool:
    """Return whether the model's class overrides ``generate``, or a library wraps it."""
    return not is_of_transformers(type(model).generate)


def _check_generate(model: Any) -> None:
    """Raise UnsupportedModelError if transformers' ``generate`` cannot be reached through the
    class's.
    """
    if has_own_generate(model):
        parameters = signature(type(model).generate).parameters
        if "custom_generate" not in parameters and all(
            p.kind != Parameter.VAR_KEYWORD for p in parameters.values()
        ):
            raise _own_generate(
                model, "which does not take all arguments of transformers' generate"
            )


def _call(
    speculator: Speculator,
    slo: Any,
    arguments: dict[str, Any],
    arrived_s: float,
    stock: StockCall,
    is_part: bool = False,
) -> Call:
    """Return the call of what stock prepared."""
    model = speculator.target.model
    inputs = stock.model_kwargs
    names = list[str]()
    encoder = None
    check_cache(*given_cache(inputs), is_prepared=True)
    if foreign := foreign_members((stock.processors, stock.criteria)):
        raise UnsupportedModelError(
            f"{type(model).__name__} decodes with lists of processors or criteria that are not transformers' own "
            f"({', '.join(foreign)}), which speculation does not call; return a LogitsProcessorList and a "
            "StoppingCriteriaList, or call generate without slo_tpot"
        )
    if model.config.is_encoder_decoder:
        inputs, encoder = decoder_inputs(inputs), EncoderInputs(model, stock.inputs, inputs)
    else:
        names = names_beside_text(model, {k: v for k, v in inputs.items() if k not in PREPARED})
        inputs = inputs if names else without_token_types(inputs, speculator.target)
    check_options(stock.config, inputs, names)
    check_criteria(stock.criteria, speculator.target.ranks.num_deciding)
    prompt = PromptInputs.of(
        stock.input_ids, inputs, stock.config, model.get_input_embeddings(), bool(names)
    )
    whole = (
        None
        if encoder is not None
        else WholePrompts.of(speculator.target.packed, prompt, inputs, names)
    )
    if speculator.target.ranks.is_led:
        check_forwards(model, stock.processors, whole is not None)
    stages = stages_by_row(
        slo, len(stock.input_ids), stock.config.num_return_sequences, arguments.get("tokenizer")
    )
    grammars, streamer = (
        [draft_grammar(stock.processors) for _ in stages],
        arguments.get("streamer"),
    )
    callbacks = *stock.processors, *stock.criteria, *([] if streamer is None else [streamer])
    rows = Rows(
        stock.input_ids, prompt, whole, encoder, stock.config, stock.criteria, stages, grammars, arrived_s, streamer,
        any(map(is_users, callbacks)),
    )  # fmt: skip
    check_prompts(rows, speculator.target, has_placeholders=bool(names))
    return Call(rows, stock, speculator, encoder, is_part, bool(names))


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


def _for_stock(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    new_stop_strings: NewStopStrings = StopStrings,
) -> dict[str, Any]:
    """Return the arguments without those that stock would drop, refuse or misread."""
    kept = {name: value for name, value in arguments.items() if name not in ("streamer", "labels")}
    kept = without_drafts(
        model, kept
    )  # with them, stock would choose assisted decoding, which takes only one row
    for name in ("inputs", "input_ids"):
        if isinstance(ids := kept.get(name), torch.Tensor) and ids.ndim == 1:
            kept[name] = ids[None]
            if isinstance(mask := kept.get("attention_mask"), torch.Tensor) and mask.ndim == 1:
                kept["attention_mask"] = mask[None]
    strings = configured("stop_strings", model, kept)
    tokenizer = kept.get("tokenizer")
    if (
        strings is not None and tokenizer is not None
    ):  # without a tokenizer stock says what is missing
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
    if (
        generates_in_parts(model) and "inputs" in arguments
    ):  # Whisper's generate takes them by the encoder's name only
        arguments = {
            model.main_input_name if name == "inputs" else name: value
            for name, value in arguments.items()
        }
    if arguments.get("tokenizer") is None:  # a generate of the model's own may not know it
        arguments = {name: value for name, value in arguments.items() if name != "tokenizer"}
    kept = {
        name: value
        for name, value in arguments.items()
        if name not in ("assistant_model", "assistant_tokenizer")
    }
    return _without(model, kept, "prompt_lookup_num_tokens")


def _without(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a call's arguments with a setting turned off where it is set; stock warns of settings
    set twice.
    """
    kept = {key: value for key, value in arguments.items() if key != name}
    if getattr(config := kept.get("generation_config"), name, None) is not None:
        kept["generation_config"] = copy.copy(config)
        setattr(kept["generation_config"], name, None)
    return kept if getattr(model.generation_config, name, None) is None else kept | {name: None}
