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
from hf_slospec.families.encoder import EncoderInputs, generates_in_parts
from hf_slospec.generate.arguments import check_arguments, configured
from hf_slospec.generate.images import WholePrompts, names_beside_text
from hf_slospec.generate.processors import (
    draft_grammar,
    draft_processors,
    ignore_sequence,
    is_users,
    processors_of_row,
)
from hf_slospec.generate.prompt import PromptInputs, check_ids, prompt_reader
from hf_slospec.generate.rows import Rows, Stops, StopStrings, pad_token
from hf_slospec.generate.speculator import Speculator
from hf_slospec.generate.validation import PREPARED, validated_inputs
from hf_slospec.model.coupling import Coupling
from hf_slospec.model.noise import default_generator
from hf_slospec.model.ownership import is_of_transformers
from hf_slospec.model.properties import FORWARD_ERRORS, vocab_size
from hf_slospec.model.sampling import Record, StockSampler
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.params import RequestParams, SubmitOptions
from hf_slospec.request.request import NewNoise, Request
from hf_slospec.request.slo import SLOTpot, Stages, parse_slo

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

    params: list[RequestParams]  # one per row
    arrived_s: float
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
        num_rows = len(self.params)
        has_callbacks = self.rows.stops.has_callbacks
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

    def begin(self, new_noise: NewNoise | None = None) -> None:
        """Make the requests of a ``generate`` call."""
        self.rows.requests = [
            Request(one.row, one, self.arrived_s, new_noise=new_noise) for one in self.params
        ]

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
    options: SubmitOptions | None = None,
    earlier: RequestMetrics | None = None,
    is_idle: bool = True,
    new_stop_strings: NewStopStrings = StopStrings,
) -> Call:
    """Check a call and return it as stock ``generate`` would begin to decode it.

    Args:
        arguments: those of stock ``generate``, by name.
        options: of a submitted request; None for a call of ``generate``.
        earlier: metrics of the request that a submitted one continues.
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
    beside = {k: v for k, v in arguments.items() if k not in TEXT_ARGUMENTS}
    has_images = bool(names_beside_text(model, beside))
    if has_images and speculator.target.ranks.is_led:
        raise UnsupportedOptionError(
            "images, audio and video cannot be submitted to the batcher of a tensor-parallel model, as its encoder "
            "would run in one of its processes only; call generate with them in every process, while no batcher runs"
        )
    calls = list[StockCall]()
    error: Exception | None = None
    # Stock may forward the image encoder.
    with speculator.lock if has_images else contextlib.nullcontext():
        try:
            output = _run_stock(model, _for_stock(model, arguments, new_stop_strings), calls.append)
        except FORWARD_ERRORS as raised:
            if not calls:
                raise
            error = raised
    if error is not None or len(calls) != 1 or output is not calls[0]:
        what = "which changes what transformers' generate returns" if calls else ""
        raise _own_generate(model, what) from error
    return _call(speculator, slo, arguments, arrived_s, calls[0], options=options, earlier=earlier)


def _run_stock(
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

    def decode_part(stock: StockCall) -> Any:
        nonlocal num_parts
        num_parts += 1
        arrived_s = speculator.target.ranks.clock()
        return decode(_call(speculator, slo, arguments, arrived_s, stock, is_part=is_whisper))

    output = _run_stock(model, _for_stock(model, arguments), decode_part)
    if not (num_parts or is_whisper):
        generator.set_state(state)
        raise _own_generate(model, "")
    return output


def _check(
    speculator: Speculator, slo_tpot: SLOTpot, arguments: dict[str, Any], is_idle: bool = True
) -> Stages | list[Stages]:
    """Check a call's arguments before stock sees them, renew the models, and return the parsed SLO."""
    model = speculator.target.model
    if has_own_generate(model):  # transformers' must be reached through it
        parameters = signature(type(model).generate).parameters
        takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters.values())
        if "custom_generate" not in parameters and not takes_all:
            raise _own_generate(
                model, "which does not take all arguments of transformers' generate"
            )
    check_arguments(model, arguments)
    if slo_tpot is None:
        slo_tpot = configured("slo_tpot", model, arguments)
    tokenizer = arguments.get("tokenizer")
    slo = parse_slo(
        slo_tpot,
        None if tokenizer is None else lambda text: StopStrings(tokenizer, text).ends,
    )
    speculator.renew(is_idle)
    return slo


def has_own_generate(model: Any) -> bool:
    """Return whether the model's class overrides ``generate``, or a library wraps it."""
    return not is_of_transformers(type(model).generate)


def stages_by_row(
    slo: Stages | list[Stages], num_rows: int, num_return_sequences: int = 1
) -> list[Stages]:
    """Return every row's stages; a list may hold one SLO per prompt (for all its returned
    sequences) or per row.

    Raises:
        InvalidInputError: the list has another length.
    """
    if not isinstance(slo, list):
        return [slo] * num_rows
    if len(slo) * num_return_sequences == num_rows:
        slo = [prompt_slo for prompt_slo in slo for _ in range(num_return_sequences)]
    if len(slo) != num_rows:
        raise InvalidInputError(
            f"slo_tpot has {len(slo)} entries for {num_rows} rows; give one number for all rows or one entry per row"
        )
    return slo


def _call(
    speculator: Speculator,
    slo: Stages | list[Stages],
    arguments: dict[str, Any],
    arrived_s: float,
    stock: StockCall,
    is_part: bool = False,
    options: SubmitOptions | None = None,
    earlier: RequestMetrics | None = None,
) -> Call:
    """Return the call of what stock prepared, with the parameters of its requests."""
    checked = speculator.target
    model = checked.model
    input_ids, processors, criteria, config, model_kwargs, _ = stock
    inputs, names = validated_inputs(checked, config, processors, criteria, model_kwargs)
    encoder = None
    if model.config.is_encoder_decoder:
        encoder = EncoderInputs(model, stock.inputs, model_kwargs)
    prompt = PromptInputs.of(input_ids, inputs, config, model.get_input_embeddings(), bool(names))
    whole = WholePrompts.of(checked.packed, prompt, inputs, names) if encoder is None else None
    if whole is not None and checked.ranks.is_led:
        raise UnsupportedOptionError(
            f"{type(model).__name__} processes prompts as a whole, and the batcher of a tensor-parallel model cannot; "
            "call generate in every process, while no batcher runs"
        )
    streamer = arguments.get("streamer")
    callbacks = *processors, *criteria, *([] if streamer is None else [streamer])
    has_callbacks = any(map(is_users, callbacks))
    record = Record(len(input_ids), config)
    stops = Stops(criteria, input_ids, record.scores_of, pad_token(config), has_callbacks)
    stages = stages_by_row(slo, len(input_ids), config.num_return_sequences)
    prompts = [prompt.tokens_of(row) for row in range(len(input_ids))]
    prompt.check(checked, stops.max_new_tokens, input_ids.shape[1], has_placeholders=bool(names))
    asked = SubmitOptions() if options is None else options
    if options is not None:
        record.num_top = options.logprobs
        if len(prompts) > 1:
            raise UnsupportedOptionError(
                "num_return_sequences must be 1; submit once per sequence, with seeds"
            )
        if options.resume is not None:
            check_ids("resume", options.resume.tokens, vocab_size(model))
    params = [
        RequestParams(
            tokens,
            stops.max_new_tokens,
            stages[row],
            ttft_slo_s=stages[row][0].ttft_slo_s or asked.slo_ttft,
            priority=asked.priority,
            is_best_effort=asked.best_effort,
            must_guarantee=asked.must_guarantee,
            cache_salt=asked.cache_salt,
            is_sampled=bool(config.do_sample),
            row=row,
            num_padding=max(map(len, prompts)) - len(tokens),
            is_stop=stops.of(row, len(tokens)),
            prefill=None if whole is None else whole.prefill(row),
            encoded_for=None if encoder is None else encoder.of_row(row),
            prompt_reader=prompt_reader(model, tokens, asked.prompt_logprobs, whole is not None),
            may_draft=asked.speculative,
            has_callbacks=has_callbacks,
            ends_with_others=options is None,
            e2e_slo_s=asked.slo_e2e,
            grammar=draft_grammar(processors),
            earlier=earlier,
            value=asked.value,
        )
        for row, tokens in enumerate(prompts)
    ]
    rows = Rows(input_ids, prompt, stops, record, streamer)
    return Call(params, arrived_s, rows, stock, speculator, encoder, is_part, bool(names))


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
