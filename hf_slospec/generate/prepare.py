"""Preparation of a call: stock ``generate`` prepares inputs, logits processors and stopping
criteria, from which the parameters of the requests are made. Refused calls fall back to stock
``generate`` in ``generate/call.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from transformers.generation import GenerationMode, MaxTimeCriteria

from hf_slospec.errors import InvalidInputError, UnsupportedModelError, UnsupportedOptionError
from hf_slospec.generate.arguments import check_arguments, check_cache, configured
from hf_slospec.generate.images import WholePrompts, names_beside_text
from hf_slospec.generate.processors import (
    draft_grammar,
    draft_processors,
    ignore_sequence,
    is_users,
    processors_of_rows,
    reads_of_length,
)
from hf_slospec.generate.prompt import CallInputs, check_ids, prompt_reader
from hf_slospec.generate.rows import Rows, StopStrings, pad_token
from hf_slospec.generate.speculator import Speculator
from hf_slospec.generate.stock import (
    NewStopStrings,
    StockCall,
    arguments_for_stock,
    generates_in_parts,
    has_own_generate,
    own_generate_error,
    run_stock,
)
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.coupling import Coupling
from hf_slospec.model.family import EncoderOutputs
from hf_slospec.model.noise import default_generator
from hf_slospec.model.ownership import foreign_members
from hf_slospec.model.properties import CACHE_NAMES, FORWARD_ERRORS, given_cache, vocab_size
from hf_slospec.model.record import Record
from hf_slospec.model.sampling import StockSampler
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.params import RequestParams, SubmitOptions
from hf_slospec.request.request import NewNoise, Request
from hf_slospec.request.slo import SLOTpot, Stages, parse_slo

# Inputs that stock generate prepares and that speculation handles or may ignore; other inputs are
# refused.
PREPARED = {
    *CACHE_NAMES,
    "attention_mask",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "use_cache",
}
TEXT_ARGUMENTS = {*PREPARED, "input_ids", "inputs"}


@dataclass(frozen=True)
class Call:
    """A call of ``generate`` that is ready to be decoded."""

    params: list[RequestParams]  # one per row
    arrived_s: float
    rows: Rows
    stock: StockCall
    speculator: Speculator
    encoder: EncoderOutputs | None = None
    # The call decodes one part of an output that the class's own generate assembles.
    is_part: bool = False
    has_images: bool = False  # the prompts hold images, audio or video

    def sampler(self, seed: int | None = None, sharing: int = 1) -> StockSampler:
        """Return the sampler of the call's rows.

        Args:
            seed: seed of the noise; None: the seed is drawn from torch's global generator.
            sharing: number of samplers that share the memory for noise.
        """
        num_rows = len(self.params)
        has_callbacks = self.rows.has_callbacks
        # The user's callbacks may draw from the global generator, too, so a single row must draw
        # noise in the same order as stock. The rows of a batch cannot in any case.
        may_draw = has_callbacks and seed is None and num_rows == 1 and self.stock.config.do_sample
        return StockSampler(
            processors_of_rows(self.stock.processors, num_rows),
            self.stock.config.do_sample,
            self.rows.input_ids.tolist(),
            self.rows.input_ids.device,
            None if may_draw else reads_of_length(self.stock.processors),
            self.rows.record,
            seed,
            sharing,
            self.speculator.config.exact is not None,
            has_callbacks,
        )

    def begin(self, new_noise: NewNoise | None = None) -> None:
        """Create the requests of a ``generate`` call."""
        self.rows.requests = [
            Request(one.row, one, self.arrived_s, new_noise=new_noise) for one in self.params
        ]

    def noise_of(self, sampler: StockSampler, request: Request) -> Coupling | None:
        """Return the noise with which the sampler will choose a request's tokens, in a form that
        drafts use; None if drafts cannot use it.
        """
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
    is_idle: bool | None = True,
    new_stop_strings: NewStopStrings = StopStrings,
) -> Call:
    """Check a call, let stock ``generate`` prepare it up to its decoding loop, and return it ready
    to be decoded.

    Args:
        speculator: the target and its drafter.
        slo_tpot: as callers pass it.
        arguments: the arguments of stock ``generate`` by name.
        options: options of a submitted request; None for a call of ``generate``.
        earlier: metrics of the request that a submitted one continues.
        is_idle: see :meth:`Speculator.renew`; None: do not look for changes of the model.
        new_stop_strings: makes the stopping criterion for ``stop_strings``.

    Raises:
        InvalidInputError, InvalidTypeError, UnsupportedOptionError, UnsupportedModelError,
            IncompatibleDraftError: the call cannot be speculated; no state has changed.
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
    # Hold the lock if stock generate may run the image encoder.
    with speculator.lock if has_images else contextlib.nullcontext():
        try:
            output = run_stock(
                model, arguments_for_stock(model, arguments, new_stop_strings), calls.append
            )
        except FORWARD_ERRORS as raised:
            if not calls:
                raise
            error = raised
    if error is not None or len(calls) != 1 or output is not calls[0]:
        what = "which changes what transformers' generate returns" if calls else ""
        raise own_generate_error(model, what) from error
    return _call(speculator, slo, arguments, arrived_s, calls[0], options=options, earlier=earlier)


@torch.no_grad()
def generate_in_parts(
    speculator: Speculator,
    slo_tpot: SLOTpot,
    arguments: dict[str, Any],
    decode: Callable[[Call], Any],
) -> Any:
    """Run a model class's own ``generate`` that calls transformers' once per part of the output,
    and let ``decode`` replace those calls.

    Whisper's ``generate`` decodes long audio in segments, and decodes a segment again at higher
    temperatures if its text looks wrong. The ``generate`` of other libraries may process the output
    in any way.

    Raises:
        SLOSpecError: as raised by :func:`prepare`.
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

    output = run_stock(model, arguments_for_stock(model, arguments), decode_part)
    if not (num_parts or is_whisper):
        generator.set_state(state)
        raise own_generate_error(model, "")
    return output


def _check(
    speculator: Speculator,
    slo_tpot: SLOTpot,
    arguments: dict[str, Any],
    is_idle: bool | None = True,
) -> Stages | list[Stages]:
    """Check a call's arguments before stock ``generate`` gets them, update the packed models, and
    return the parsed SLO.
    """
    model = speculator.target.model
    if has_own_generate(model):  # it must pass custom_generate on to transformers' generate
        parameters = signature(type(model).generate).parameters
        takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters.values())
        if "custom_generate" not in parameters and not takes_all:
            raise own_generate_error(
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
    if is_idle is not None:
        speculator.renew(is_idle)
    return slo


def stages_by_row(
    slo: Stages | list[Stages], num_rows: int, num_return_sequences: int = 1
) -> list[Stages]:
    """Return the stages of every row.

    Args:
        slo: stages of all rows; or a list with the stages of each prompt, which apply to all
            sequences returned for it, or of each row.
        num_rows: number of rows.
        num_return_sequences: number of rows per prompt.

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


def validated_inputs(
    checked: CheckedModel, stock: StockCall
) -> tuple[dict[str, Any], list[str], EncoderOutputs | None]:
    """Check what stock ``generate`` prepared.

    Returns:
        The decoder's inputs by name; the names of inputs that are images, audio or video; and the
        encoder's outputs, None for a decoder-only model.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: the inputs or options cannot be speculated.
    """
    model = checked.model
    _, processors, criteria, config, inputs, _ = stock
    check_cache(*given_cache(inputs), is_prepared=True)
    if foreign := foreign_members((processors, criteria)):
        raise UnsupportedModelError(
            f"{type(model).__name__} decodes with lists of processors or criteria that are not transformers' own "
            f"({', '.join(foreign)}), which speculation does not call; return a LogitsProcessorList and a "
            "StoppingCriteriaList, or use stock generate (fallback=True)"
        )
    names: list[str] = []
    inputs, encoder = checked.packed.family.prepared(model, stock.inputs, inputs)
    if encoder is None:
        names = names_beside_text(model, {k: v for k, v in inputs.items() if k not in PREPARED})
        # BERT tokenizers return token_type_ids even for a single text.
        types = None if names else inputs.get("token_type_ids")
        if types is not None:
            is_led = checked.ranks.is_led
            if is_led or bool(types.any()) or not checked.ignores_zero_types:
                raise UnsupportedOptionError(
                    f"token_type_ids cannot be combined with slo_tpot where they change what {type(model).__name__} "
                    "computes; only zeros that mean the same as none are taken, so use stock generate (fallback=True)"
                )
            inputs = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedOptionError(
            f"slo_tpot works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}; "
            "set num_beams=1 (and no other search option), or use stock generate (fallback=True)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise UnsupportedOptionError(
                f"{name}=True is not available with slo_tpot: stock returns them per forward of one token; "
                "use stock generate (fallback=True)"
            )
    is_given = {k for k, v in inputs.items() if v is not None and not (type(v) is dict and not v)}
    if extra := sorted(is_given - {*PREPARED, *names, "mm_token_type_ids"}):
        raise UnsupportedOptionError(
            f"{', '.join(extra)} cannot be combined with slo_tpot; leave it out"
        )
    # The processes of a tensor-parallel model must stop at the same token.
    if checked.ranks.num_deciding > 1 and any(isinstance(c, MaxTimeCriteria) for c in criteria):
        raise UnsupportedOptionError(
            "max_time cannot be combined with slo_tpot and a tensor-parallel model, whose processes would stop at "
            "different tokens; leave it out, and limit the output by max_new_tokens"
        )
    for each in processors if checked.ranks.is_led else ():
        held = getattr(each, "__dict__", {}).values()
        if any(isinstance(value, torch.nn.Module) for value in held):
            raise UnsupportedOptionError(
                f"{type(each).__name__} forwards a model, and the batcher of a tensor-parallel model runs processors "
                "in its first process alone; leave out what asks for it, such as guidance_scale"
            )
    return inputs, names, encoder


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
    """Create a call from what stock ``generate`` prepared, with the parameters of its requests."""
    checked = speculator.target
    model = checked.model
    input_ids, processors, criteria, config, *_ = stock
    inputs, names, encoder = validated_inputs(checked, stock)
    prompt = CallInputs.of(input_ids, inputs, config, model.get_input_embeddings(), bool(names))
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
    rows = Rows(input_ids, prompt, criteria, record, streamer, pad_token(config), has_callbacks)
    stages = stages_by_row(slo, len(input_ids), config.num_return_sequences)
    prompts = [prompt.tokens_of(row) for row in range(len(input_ids))]
    prompt.check(checked, rows.max_new_tokens, input_ids.shape[1], has_placeholders=bool(names))
    has_inputs = whole is not None or encoder is not None or prompt.embeds is not None
    is_text = not has_inputs and not prompt.num_cached
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
            rows.max_new_tokens,
            stages[row],
            ttft_slo_s=stages[row][0].ttft_slo_s or asked.slo_ttft,
            priority=asked.priority,
            is_best_effort=asked.best_effort,
            must_guarantee=asked.must_guarantee,
            cache_salt=asked.cache_salt,
            is_sampled=bool(config.do_sample),
            row=row,
            num_padding=max(map(len, prompts)) - len(tokens),
            is_stop=rows.stop_of(row, len(tokens)),
            prefill=None if whole is None else partial(whole.prefill, row),
            encoded_for=None if encoder is None else encoder.of_row(row),
            is_text=is_text,
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
    return Call(params, arrived_s, rows, stock, speculator, encoder, is_part, bool(names))
