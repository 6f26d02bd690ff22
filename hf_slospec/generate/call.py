"""``Decoder``, which serves calls of ``generate`` in place of the stock one: it chooses the
speculator, falls back to stock ``generate`` where a call is refused, and decodes prepared calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.load_drafter import (
    Drafting,
    assistant_method,
    drafting_method,
    one_way_to_draft,
)
from hf_slospec.drafters.lookup import MAX_NGRAM, LookupMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.engine.events import StepEvent
from hf_slospec.errors import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.arguments import check_flag, configured
from hf_slospec.generate.prepare import Call, generate_in_parts, prepare
from hf_slospec.generate.speculator import MEASURE_S, Speculator
from hf_slospec.generate.stock import (
    batch_level_names,
    foreign_generate,
    generates_in_parts,
    has_own_generate,
    run_stock_loop,
    stock_generate,
    without_drafts,
)
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.loading import check_causal_lm, check_tokenizer
from hf_slospec.model.noise import default_generator
from hf_slospec.model.properties import CACHE_NAME, vocab_size
from hf_slospec.request.metrics import MetricsOfRows
from hf_slospec.request.request import Request
from hf_slospec.request.slo import SLOTpot


class _WithMetrics:
    """Attributes that outputs of speculated calls have beside stock's fields."""

    slo: MetricsOfRows | None = None  # one entry per row
    steps: list[StepEvent] | None = None  # in order of time, prefill first

    def __repr__(self) -> str:
        """Return the fields' names and sizes, and the metrics as a table."""
        fields: Any = self
        sizes = [
            f"{name}: {list(value.shape)}" if isinstance(value, torch.Tensor) else name
            for name, value in fields.items()
        ]
        return f"<{type(self).__name__} {', '.join(sizes)}>" + (
            "" if self.slo is None else f"\n{self.slo}"
        )

    def _repr_html_(self) -> str:
        return "" if self.slo is None else self.slo._repr_html_()


class SLOSpecOutput(_WithMetrics, GenerateDecoderOnlyOutput):
    """Hugging Face's output with the metrics of every row and the record of every step.

    Both are plain attributes: keys, items, ``to_tuple()``, indices and pytree leaves are the same
    as in stock's output. Copies and pickles keep them; functions that rebuild an output from its
    items leave them None.
    """


class SLOSpecEncoderDecoderOutput(_WithMetrics, GenerateEncoderDecoderOutput):
    """Output of an encoder-decoder with the attributes of :class:`SLOSpecOutput`."""


class Done(NamedTuple):
    """Counts of rows that were decoded by speculation."""

    rows: int = 0
    tokens: int = 0  # new tokens, without each row's first one, which its prefill yields
    steps: int = 0  # decode steps, summed over rows
    drafted: int = 0  # drafted tokens that were verified
    accepted: int = 0

    @classmethod
    def of(cls, request: Request) -> Done:
        """Return the counts of one row."""
        stats = request.stats
        num_tokens = max(request.num_emitted - 1, 0)
        return cls(1, num_tokens, stats.num_steps, stats.num_drafted, stats.num_accepted)

    def __add__(self, other: tuple[int, ...]) -> Done:  # type: ignore[override]
        return Done(*map(sum, zip(self, other, strict=True)))

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per row and decode step (acceptance length); None before the first step."""
        return self.tokens / self.steps if self.steps else None


class Decoder:
    """Serves one model's calls of ``generate`` by tree speculation."""

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | Drafting | None = None,
        *,
        drafter: Drafting | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        config: SLOSpecConfig | None = None,
        make_policy: NewPolicy | None = None,
        fallback: bool = False,
    ):
        self.model = check_causal_lm("model", model)
        if config is not None and not isinstance(config, SLOSpecConfig):
            raise InvalidTypeError(f"config must be a SLOSpecConfig, got {type(config).__name__}")
        self.config = config or SLOSpecConfig()
        self.fallback = check_flag("fallback", fallback)
        if make_policy is not None and not callable(make_policy):
            raise InvalidTypeError(
                "make_policy must be a class or function that takes a config and StepCosts and returns a policy, got "
                f"{type(make_policy).__name__}"
            )
        self.make_policy = make_policy
        check_tokenizer(tokenizer)
        check_tokenizer(assistant_tokenizer, "assistant_tokenizer")
        self.tokenizer = tokenizer
        assistant, self._drafter = one_way_to_draft(assistant_model, drafter)
        self.method = drafting_method(
            self.model, assistant, self._drafter, tokenizer, assistant_tokenizer
        )
        self._target: CheckedModel | None = None
        self._speculator: Speculator | None = None
        # By kind of method ("assistant", "lookup", "drafter"): key and speculator of the last call
        # that asked for such a method.
        self._speculators = dict[str, tuple[tuple[Any, ...], Speculator]]()
        self._refusal = ""  # why the target cannot be speculated
        # Set by enable(): the generate that was set on the instance, or None, as a 1-tuple.
        self.replaced: tuple[Any] | None = None
        self.scope = "calls of the generator"  # which calls are speculated
        # Selects the policy of submitted requests; None: as that of calls.
        self.batcher_config: SLOSpecConfig | None = None
        self.done = Done()  # of all calls and submitted requests
        self.on_end: Callable[[Request], None] | None = None  # called with each row that is counted
        try:
            self._target = CheckedModel(self.model, self.config, MEASURE_S["target"])
            self._speculator = Speculator(self._target, self.method, self.config, make_policy)
        except UnsupportedModelError as error:
            if not fallback:
                raise
            self._refusal = str(error)

    @property
    def drafts(self) -> str:
        """Kind of the drafting method of calls that name none."""
        return self.method.kind

    @property
    def is_led(self) -> bool:
        """Return whether a batcher leads the processes of a tensor-parallel model, so that none of
        them can run ``generate``.
        """
        return self._target is not None and self._target.ranks.is_led

    def generate(
        self,
        slo_tpot: SLOTpot,
        arguments: dict[str, Any],
        fallback: bool | None = None,
        drafter: Drafting | None = None,
    ) -> Any:
        """Return what stock ``generate`` returns for these arguments.

        If the call cannot be speculated, stock ``generate`` runs if ``fallback`` is True.

        Args:
            slo_tpot: as callers pass it.
            arguments: the arguments of ``generate`` by name.
            fallback: overrides the decoder's setting; None: keep it.
            drafter: what drafts for this call; None: what the arguments or the decoder name.
        """
        may_fall_back = self.fallback if fallback is None else check_flag("fallback", fallback)
        if self.is_led:
            raise UnsupportedOptionError(
                "generate was called while the batcher of this tensor-parallel model runs, which uses its processes; "
                "submit the prompts, or stop() the batcher first"
            )
        try:
            speculator = self.speculator_of(arguments, drafter)
            if generates_in_parts(self.model) or has_own_generate(self.model):
                return generate_in_parts(speculator, slo_tpot, arguments, self._decode)
            return self._decode(prepare(speculator, slo_tpot, arguments))
        except (UnsupportedModelError, UnsupportedOptionError, IncompatibleDraftError) as error:
            if not may_fall_back:
                raise
            warnings.warn(
                f"stock generate runs instead, without slo_tpot: {error}",
                FallbackWarning,
                stacklevel=3,
            )
        if self._skipped is not None:
            return self._skipped(**arguments)
        return stock_generate(self.model)(**without_drafts(self.model, arguments))

    @property
    def _skipped(self) -> Any:
        """A ``generate`` that other code (neither transformers nor this package) set on the model
        instance, and that a speculated call would bypass; None if there is none.
        """
        return foreign_generate(
            self.replaced[0] if self.replaced else vars(self.model).get("generate")
        )

    def _decode(self, call: Call) -> Any:
        """Decode a call, and count what it did."""
        output = decode(call)
        for request in call.rows.requests:
            self.count(request)
        return output

    def count(self, request: Request) -> None:
        """Count a row that has ended."""
        self.done += Done.of(request)
        if self.on_end is not None:
            self.on_end(request)

    def speculator_of(
        self, arguments: dict[str, Any], drafter: Drafting | None = None
    ) -> Speculator:
        """Return the speculator for the drafter, assistant model or prompt lookup that a call asks
        for, else the decoder's own one.

        Raises:
            InvalidInputError: the call asks for several ways to draft, or there is no such drafter.
            UnsupportedModelError: other code set a ``generate`` on the model instance, which
                speculation would bypass; or as :meth:`speculator_for`.
        """
        if self._skipped is not None:
            raise UnsupportedModelError(
                f"generate was set on this {type(self.model).__name__}, by its repository's custom_generate folder or "
                "by other code, and may decode in its own way; call it without slo_tpot, delete the attribute (del "
                "model.generate), or pass fallback=True"
            )
        assistant, drafter = one_way_to_draft(arguments.get("assistant_model"), drafter)
        tokenizers = arguments.get("tokenizer"), arguments.get("assistant_tokenizer")
        if drafter is not None:
            if arguments.get("prompt_lookup_num_tokens") is not None:
                raise InvalidInputError(
                    "prompt_lookup_num_tokens and drafter are two ways to draft; give one of them"
                )
            return self._by_drafter(drafter, *tokenizers)
        speculator = self.speculator_for(assistant, *tokenizers)
        return self._by_lookup(arguments) or speculator

    @property
    def speculator(self) -> Speculator:
        """The speculator of calls that name no assistant model."""
        return self.speculator_for(None)

    def speculator_for(
        self, assistant_model: Any, tokenizer: Any = None, assistant_tokenizer: Any = None
    ) -> Speculator:
        """Return the speculator for a call's assistant model and tokenizers; the last one is
        cached.

        As in stock ``generate``, the tokenizers are ignored without an assistant model.

        Raises:
            InvalidTypeError: an argument is no loaded model or tokenizer.
            InvalidInputError: ``assistant_tokenizer`` was given although both models have one
                vocabulary size, or without ``tokenizer``.
            UnsupportedModelError: the target cannot be speculated.
            IncompatibleDraftError: the models have different vocabularies, and not both tokenizers
                were given.
        """
        check_tokenizer(assistant_tokenizer, "assistant_tokenizer")
        draft = (
            None if assistant_model is None else check_causal_lm("assistant_model", assistant_model)
        )
        known = self.tokenizer if tokenizer is None else tokenizer
        tokenizers = () if assistant_tokenizer is None else (known, assistant_tokenizer)
        if draft is not None and tokenizers:
            if vocab_size(self.model) == vocab_size(draft):
                raise InvalidInputError(
                    f"assistant_tokenizer is for an assistant_model with another tokenizer, and both models have "
                    f"{vocab_size(draft)} tokens; leave it out, or, if their ids differ all the same, draft with "
                    "drafter=hf_slospec.load_drafter(assistant_model, model, tokenizer=..., assistant_tokenizer=...)"
                )
            if known is None:
                raise InvalidInputError(
                    "assistant_tokenizer was given without tokenizer, that of the model; pass both"
                )
        if (
            self._target is not None
            and draft is not None
            and (draft is not self.method.model or tokenizers)
        ):
            new_method = partial(assistant_method, draft, self.model, *tokenizers)
            return self._cached("assistant", (draft, *tokenizers), new_method)
        if self._speculator is None:
            raise UnsupportedModelError(self._refusal)
        return self._speculator

    def _by_drafter(
        self, drafter: Any, tokenizer: Any = None, assistant_tokenizer: Any = None
    ) -> Speculator:
        """Return the speculator for a call's ``drafter``; the last one is cached."""
        if self._target is None or drafter == self._drafter:
            return self.speculator
        known = self.tokenizer if tokenizer is None else tokenizer
        new_method = partial(drafting_method, self.model, None, drafter, known, assistant_tokenizer)
        return self._cached("drafter", (drafter, tokenizer, assistant_tokenizer), new_method)

    def _by_lookup(self, arguments: dict[str, Any]) -> Speculator | None:
        """Return the speculator for stock's ``prompt_lookup_num_tokens``, which has separate costs;
        None if the call does not set it.
        """
        num_tokens = configured("prompt_lookup_num_tokens", self.model, arguments)
        if num_tokens is None or self._target is None:
            return None
        max_ngram = configured("max_matching_ngram_size", self.model, arguments) or MAX_NGRAM
        new_method = partial(LookupMethod, max_ngram, num_tokens)
        return self._cached("lookup", (max_ngram, num_tokens), new_method)

    def _cached(
        self, kind: str, key: tuple[Any, ...], new_method: Callable[[], DraftMethod]
    ) -> Speculator:
        """Return the speculator for a drafting method that a call asks for; the last one of each
        kind is cached.
        """
        last_key, speculator = self._speculators.get(kind, ((), None))
        if speculator is None or last_key != key:
            assert self._target is not None
            speculator = Speculator(self._target, new_method(), self.config, self.make_policy)
            self._speculators[kind] = key, speculator
        return speculator


@torch.no_grad()
def decode(call: Call) -> Any:
    """Decode a prepared call to its end, and return what stock ``generate`` returns.

    If the call's processors, criteria or streamer rule out speculation, stock's loop decodes it,
    with a warning.
    """
    rows = call.rows
    stock = call.stock
    speculator = call.speculator
    record = call.rows.record
    is_dict = stock.config.return_dict_in_generate
    num_rows = len(call.params)
    reason = ""
    if num_rows > 1 and (names := batch_level_names(stock.processors, stock.criteria, num_rows)):
        reason = (
            f"{', '.join(names)} may look at the whole batch, so all rows are decoded in step, without speculation; "
            "set per_row = True on what treats every row by itself"
        )
    elif rows.has_callbacks and rows.prompt.is_cache_given:
        reason = (
            "the call's processors, criteria or streamer may look at the cache that it was given, which speculation "
            "fills at the end only, so its tokens are decoded without speculation; leave one of them out"
        )
    if reason:
        warnings.warn(reason, FallbackWarning, stacklevel=2)
        call.begin()
        output = run_stock_loop(
            speculator.target.model, rows, speculator.target.ranks.clock, *stock[1:5]
        )
        return _output(call, **output) if is_dict else output
    cache = rows.prompt.cache if is_dict or rows.prompt.is_cache_given else None
    holds_finished = cache is not None or record.is_wanted
    sampler = call.sampler()
    call.begin(partial(call.noise_of, sampler))
    generator = default_generator(sampler.device)
    state = generator.get_state()
    target = speculator.new_target(sampler, holds_finished=holds_finished)
    try:
        with speculator.lock:
            rows.prompt.load_into(rows.requests, target.sequences)
        rows.begin()
        speculator.run(rows.requests, target, rows.on_step)
        rows.end()
        sampler.end(rows.num_new)
        if holds_finished:
            rows.forward_padding(target.sequences, sampler, speculator.lock)
        with speculator.lock:
            if cache is not None:
                rows.prompt.fill(cache, rows.requests, target.sequences, rows.num_new)
    except (UnsupportedModelError, UnsupportedOptionError):
        # Stock generate may run instead, with the same random numbers as if it ran first.
        generator.set_state(state)
        raise
    finally:
        for request in rows.requests:
            request.drop_hooks()
        with speculator.lock:
            target.close()
    if not is_dict:
        return rows.sequences()
    return _output(
        call,
        sequences=rows.sequences(),
        **record.outputs(rows.num_new),
        **{
            CACHE_NAME: cache
            if cache is None or call.encoder is None
            else call.encoder.fill(stock.model_kwargs)
        },
    )


def _output(call: Call, **stock: Any) -> Any:
    if call.is_part:  # the class's own generate reads fields of stock's class only
        return GenerateEncoderDecoderOutput(**stock)
    output = (
        SLOSpecOutput(**stock) if call.encoder is None else SLOSpecEncoderDecoderOutput(**stock)
    )
    output.slo = MetricsOfRows(request.metrics() for request in call.rows.requests)
    output.steps = call.rows.steps
    return output
