"""The drop-in: ``model.generate(..., slo_tpot=...)`` on top of transformers' own ``generate``.

Stock ``generate`` prepares inputs, lengths, processors and criteria and then calls our decoding method through
its ``custom_generate`` hook, so everything it accepts means what it always meant.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Drafter
from hf_slospec.engine.request import RequestMetrics
from hf_slospec.errors import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.processors import ignore_sequence, processors_of_row
from hf_slospec.generate.prompt import Context
from hf_slospec.generate.rows import Rows
from hf_slospec.generate.slo import SLOTpot, parse_slo, slo_by_row, stages_of
from hf_slospec.generate.speculator import MEASURE_S, CheckedModel, Speculator, clock
from hf_slospec.generate.stock_loop import batch_level_names, run_stock_loop
from hf_slospec.generate.validation import (
    check_arguments,
    check_causal_lm,
    check_config,
    check_drafting,
    check_evaluating,
    check_make_policy,
    check_options,
    check_prompts,
    configured,
)
from hf_slospec.models.drafters.prompt_lookup import MAX_NGRAM, PromptLookupDrafter
from hf_slospec.models.sampling import StockSampler
from hf_slospec.policies import NewPolicy


@dataclass
class SLOSpecOutput(GenerateDecoderOnlyOutput):
    """HF's output with one :class:`RequestMetrics` per row, and what happened in every step."""

    slo: list[RequestMetrics] | None = None  # one per row
    steps: list[StepEvent] | None = None  # in order, those that fed the prompts first


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    *,
    drafter: Drafter | None = None,
    config: SLOSpecConfig | None = None,
    make_policy: NewPolicy | None = None,
    always: bool = False,
    fallback: bool = False,
) -> PreTrainedModel:
    """Let ``model.generate`` take ``slo_tpot`` and decode such calls by tree speculation.

    Args:
        model: a loaded transformers causal LM, or a PEFT model around one.
        assistant_model: a smaller causal LM with the same tokenizer, on the same device. Without one, and without a
            drafter, the request's own tokens draft (prompt lookup).
        drafter: an object of your own that proposes token trees, see :class:`Drafter`.
        config: how to speculate; the defaults of :class:`SLOSpecConfig` if omitted.
        make_policy: a policy of your own, see :class:`Policy`, in place of the config's: called with the config and the
            :class:`~hf_slospec.algo.latency.StepCosts` of the models for every call.
        always: speculate calls without ``slo_tpot`` too. Otherwise they are stock ``generate``, untouched.
        fallback: run stock ``generate``, with a :class:`FallbackWarning`, where the model or an option of the call
            cannot be speculated, instead of raising. ``generate(..., fallback=...)`` overrides it for a call.

    Returns:
        The same model. Enabling it again replaces all of this.

    Raises:
        InvalidTypeError: an argument is not what it should be.
        UnsupportedModelError: either model cannot hold a tree of tokens; the message says why.
        IncompatibleDraftError: the two models do not share a vocabulary or a device.
    """
    decoder = Decoder(
        model, assistant_model, drafter=drafter, config=config, make_policy=make_policy, fallback=fallback
    )
    disable(model)
    owner = decoder.model  # a PEFT model hands generate on to the model it wraps
    replaced = owner.__dict__.get("generate")  # a custom generate of the instance's own, if it has one
    signature = inspect.signature(decoder.stock)

    @functools.wraps(decoder.stock)
    def generate(
        self: PreTrainedModel, *args: Any, slo_tpot: SLOTpot = None, fallback: bool | None = None, **kwargs: Any
    ) -> Any:
        if self is not owner:  # a deep copy carries this method along; it has no engine of its own
            if slo_tpot is not None:
                raise InvalidInputError("slo_tpot was given to a copy of an enabled model; enable the copy itself")
            return type(self).generate(self, *args, **kwargs)
        bound = signature.bind_partial(*args, **kwargs).arguments
        arguments = bound | bound.pop("kwargs", {})
        if not always and slo_tpot is None and configured("slo_tpot", owner, arguments) is None:
            return (replaced or decoder.stock)(*args, **kwargs)
        return decoder.generate(slo_tpot, arguments, fallback)

    generate.__signature__ = _with_own_arguments(signature)
    generate.replaced = replaced
    owner.generate = types.MethodType(generate, owner)
    if model is not owner:
        model.generate = functools.partial(_generate_of_adapted, model, fallback)
    return model


def _generate_of_adapted(model: Any, default_fallback: bool, *args: Any, **kwargs: Any) -> Any:
    """A PEFT model's own ``generate``: it hooks every layer before it calls ours, so this must be refused here."""
    if kwargs.get("adapter_names") is not None and kwargs.get("slo_tpot") is not None:
        if not (kwargs.pop("fallback", None) or default_fallback):
            raise UnsupportedOptionError(
                "adapter_names, one adapter per row, cannot be combined with slo_tpot; set_adapter one for the batch"
            )
        warnings.warn("stock generate runs instead, for adapter_names", FallbackWarning, stacklevel=2)
        del kwargs["slo_tpot"]
    return type(model).generate(model, *args, **kwargs)


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether :func:`enable` was called on this very model."""
    return hasattr(check_causal_lm("model", model).__dict__.get("generate"), "replaced")


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` its stock ``generate`` back. Does nothing if it is not enabled."""
    if is_enabled(model):
        owner = check_causal_lm("model", model)
        replaced = owner.__dict__.pop("generate").replaced
        model.__dict__.pop("generate", None)  # of a PEFT model around it
        if replaced is not None:
            owner.generate = replaced
    return model


def stock_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """The model class's own ``generate``, bound, whatever stands on the instance."""
    return type(model).generate.__get__(model)


@dataclass(frozen=True)
class Call:
    """A call of ``generate``, as stock prepared it for its loop."""

    rows: Rows
    processors: Any
    criteria: Any
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    def sampler(self, seed: int | None = None) -> StockSampler:
        """How its rows choose; noise is the global generator's, or a seed's own."""
        rows = self.rows
        return StockSampler(
            rows.requests,
            [processors_of_row(self.processors, row, len(rows.requests)) for row in range(len(rows.requests))],
            self.config.do_sample,
            rows.input_ids.tolist(),
            rows.input_ids.device,
            ignore_sequence(self.processors),
            rows.record,
            seed,
        )


class Decoder:
    """Stock ``generate`` of a model with the speculated decoding method in place of its own loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
        *,
        drafter: Drafter | None = None,
        config: SLOSpecConfig | None = None,
        make_policy: NewPolicy | None = None,
        fallback: bool = False,
    ):
        self.model = check_causal_lm("model", model)
        self.assistant_model = check_drafting(assistant_model, drafter)
        self.config, self.fallback = check_config(config), fallback
        self.make_policy = check_make_policy(make_policy)
        self._target: CheckedModel | None = None
        self._speculator: Speculator | None = None
        self._override: tuple[PreTrainedModel, Speculator] | None = None  # the last call's own draft
        self._refusal = ""
        try:
            self._target = CheckedModel(self.model, self.config, MEASURE_S["target"])
            self._speculator = Speculator(self._target, self.assistant_model, self.config, drafter, make_policy)
        except UnsupportedModelError as error:
            if not fallback:
                raise
            self._refusal = str(error)

    @property
    def stock(self) -> Callable[..., Any]:
        return stock_generate(self.model)

    def generate(self, slo_tpot: SLOTpot, arguments: dict[str, Any], fallback: bool | None = None) -> Any:
        """``arguments`` are those of stock ``generate``, by name."""
        try:
            return self._speculate(slo_tpot, arguments)
        except (UnsupportedModelError, UnsupportedOptionError, IncompatibleDraftError) as error:
            if not (self.fallback if fallback is None else fallback):
                raise
            warnings.warn(f"stock generate runs instead, without slo_tpot: {error}", FallbackWarning, stacklevel=3)
        draftless = {"assistant_model": None, "prompt_lookup_num_tokens": None}  # stock drafts for single rows only
        return self.stock(**arguments | draftless)

    def _speculate(self, slo_tpot: SLOTpot, arguments: dict[str, Any]) -> Any:
        speculator = self._speculator_for(arguments.get("assistant_model"))
        lookup = _prompt_lookup(self.model, arguments)

        def decode(call: Call) -> Any:
            rows, config = call.rows, call.config
            whole = batch_level_names(call.processors, call.criteria) if len(rows.requests) > 1 else []
            if not whole:
                return _decode(speculator, call, lookup)
            warnings.warn(
                f"{', '.join(whole)} may look at the whole batch, so all rows are decoded in step, without "
                "speculation; set per_row = True on what treats every row by itself",
                FallbackWarning,
                stacklevel=2,
            )
            output = run_stock_loop(self.model, rows, call.processors, call.criteria, config, call.model_kwargs)
            return _with_slo(output, rows) if config.return_dict_in_generate else output

        return self._prepared(speculator, slo_tpot, arguments, decode)

    def prepare(self, slo_tpot: SLOTpot, arguments: dict[str, Any]) -> Call:
        """What ``generate`` would decode, checked and prepared by stock up to where its loop would begin."""
        return self._prepared(self.speculator, slo_tpot, arguments, lambda call: call)

    @property
    def speculator(self) -> Speculator:
        return self._speculator_for(None)

    def _prepared(
        self, speculator: Speculator, slo_tpot: SLOTpot, arguments: dict[str, Any], then: Callable[[Call], Any]
    ) -> Any:
        """Have stock ``generate`` prepare a call, and give ``then`` the place of its loop."""
        arrived_s = clock()
        parsed = parse_slo(configured("slo_tpot", self.model, arguments) if slo_tpot is None else slo_tpot)
        check_arguments(self.model, arguments)
        check_evaluating(self.model)
        speculator.prepare()

        def decode(
            model: PreTrainedModel,
            input_ids: torch.Tensor,  # [batch, padded_len] int64
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: GenerationConfig,
            **model_kwargs: Any,  # transformers takes a named parameter of ours for one of its caller's
        ) -> Any:
            check_options(generation_config, model_kwargs)
            context = Context.of(input_ids, model_kwargs, generation_config, model.get_input_embeddings())
            targets = slo_by_row(parsed, len(input_ids), generation_config.num_return_sequences)
            stages = [stages_of(target, arguments.get("tokenizer")) for target in targets]
            streamer = arguments.get("streamer")
            rows = Rows(input_ids, context, generation_config, stopping_criteria, stages, arrived_s, streamer)
            check_prompts(rows, speculator.target.packed)
            return then(Call(rows, logits_processor, stopping_criteria, generation_config, model_kwargs))

        return self.stock(**_for_stock(self.model, arguments), custom_generate=decode)

    def _speculator_for(self, assistant_model: Any) -> Speculator:
        """The one for this call, which may bring its own draft."""
        own = check_drafting(assistant_model, None)
        if self._target is not None and own is not None and own is not self.assistant_model:
            if self._override is None or self._override[0] is not own:
                self._override = own, Speculator(self._target, own, self.config, make_policy=self.make_policy)
            return self._override[1]
        if self._speculator is None:
            raise UnsupportedModelError(self._refusal)
        return self._speculator


def _decode(speculator: Speculator, call: Call, lookup: Drafter | None) -> Any:
    """Decode the rows to their ends.  -> what stock ``generate`` returns"""
    rows, is_dict, record = call.rows, call.config.return_dict_in_generate, call.rows.record
    cache = rows.context.cache if is_dict or rows.context.is_cache_given else None
    wants_more = cache is not None or record.is_wanted  # than the tokens
    sampler = call.sampler()
    target = speculator.new_target(sampler, holds_finished=wants_more)
    try:
        with speculator.turns:
            rows.context.load_into(rows.requests, target.sequences)
        rows.begin()
        speculator.run(rows.requests, target, rows.on_step, lookup)
        rows.end()
        sampler.end(rows.num_new)
        with speculator.turns:
            if wants_more:
                rows.feed_padding(target.sequences, sampler)
            if cache is not None:
                rows.context.fill(cache, rows.requests, target.sequences, rows.num_new)
    finally:
        with speculator.turns:
            target.close()
    if not is_dict:
        return rows.sequences()
    output = GenerateDecoderOnlyOutput(
        sequences=rows.sequences(),
        scores=record.scores(rows.num_new),
        logits=record.logits(rows.num_new),
        past_key_values=cache,
    )
    return _with_slo(output, rows)


def _with_slo(output: GenerateDecoderOnlyOutput, rows: Rows) -> SLOSpecOutput:
    return SLOSpecOutput(**output, slo=[request.metrics() for request in rows.requests], steps=rows.steps)


def _prompt_lookup(model: PreTrainedModel, arguments: dict[str, Any]) -> Drafter | None:
    """The drafter of a call that asks for prompt lookup as stock does."""
    num_tokens = configured("prompt_lookup_num_tokens", model, arguments)
    if num_tokens is None:
        return None
    return PromptLookupDrafter(configured("max_matching_ngram_size", model, arguments) or MAX_NGRAM, num_tokens)


def _for_stock(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that are ours to serve: stock would drop, refuse or misread them."""
    kept = {name: value for name, value in arguments.items() if name not in ("assistant_model", "streamer")}
    kept["prompt_lookup_num_tokens"] = None  # stock would take it for another decoding method
    for name in ("inputs", "input_ids"):
        if isinstance(ids := kept.get(name), torch.Tensor) and ids.ndim == 1:
            kept[name] = ids[None]
            if isinstance(mask := kept.get("attention_mask"), torch.Tensor) and mask.ndim == 1:
                kept["attention_mask"] = mask[None]
    strings, tokenizer = configured("stop_strings", model, kept), kept.get("tokenizer")
    if strings is not None and tokenizer is not None:  # without a tokenizer stock says what is missing
        own = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
        kept["stopping_criteria"] = StoppingCriteriaList([*(kept.get("stopping_criteria") or []), own])
        kept["stop_strings"] = None
    return kept


def _with_own_arguments(signature: inspect.Signature) -> inspect.Signature:
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("slo_tpot", SLOTpot), ("fallback", bool | None))
    ]
    *parameters, last = signature.parameters.values()
    return signature.replace(parameters=[*parameters, *own, last])
