"""``BatchingService``: makes requests of the arguments of ``submit`` and queues them in the
batcher. ``SLOSpecGenerator`` is its public interface.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from transformers import PreTrainedTokenizerBase

from hf_slospec.assembly import limits_of, new_engine
from hf_slospec.batcher.batcher import Batcher
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.orders import Counts, Observer
from hf_slospec.batcher.stats import Collector, Stats, Telemetry
from hf_slospec.batcher.submission import (
    Prompt,
    check_arguments_of_one,
    inputs_after,
    inputs_of,
)
from hf_slospec.batcher.texts import Detokenizer, OutputStopStrings
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.step import Engine
from hf_slospec.errors import (
    IncompatibleDraftError,
    InvalidInputError,
    NotRunningError,
    RequestCancelledError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.extras import need
from hf_slospec.generate.arguments import check_decoder_only, configured
from hf_slospec.generate.call import Decoder
from hf_slospec.generate.images import keeping_rope_deltas
from hf_slospec.generate.prepare import prepare
from hf_slospec.model.host_memory import return_freed_memory
from hf_slospec.model.properties import autocast_dtype, trained_len
from hf_slospec.model.ranks import Follower
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.model.sampling import RequestSamplers
from hf_slospec.policies import max_nodes_per_request
from hf_slospec.request.params import SubmitOptions
from hf_slospec.request.request import Request
from hf_slospec.request.slo import SLOTpot
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits

logger = logging.getLogger(__name__)
STREAMER_S = 5.0  # seconds that stop() waits for a streamer to receive the remaining tokens


class BatchingService:
    """Decodes submitted requests together, with the models of a :class:`Decoder`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase | None,
        processor: Any = None,
        config: SLOSpecConfig | None = None,
        observer: Observer | None = None,
    ):
        """Take the models and the settings.

        Args:
            decoder: the models, and the settings of speculation.
            tokenizer: the target's.
            processor: prepares prompts with images.
            config: settings of the batcher; None: those of the decoder.
            observer: is told what the batcher tells this service.
        """
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.config = config or decoder.config
        self._observer = observer
        self.processor = processor  # for prompts with images
        # Keyed by skip_special_tokens. Kept, as they cache properties of the tokenizer.
        self._texts = {skips: Detokenizer(tokenizer, skips) for skips in (False, True)}
        self.telemetry = Telemetry()
        self._samplers = RequestSamplers()
        self._streaming: WeakSet[threading.Thread] = WeakSet()
        # A Follower in every process of a tensor-parallel model but the first.
        self._batcher: Batcher | Follower | None = None
        self._limits: Limits | None = None
        # Returns the engine, or None if there is none; later a weak reference, as the engine holds
        # all K/V.
        self._engine: Callable[[], Engine[ContinuousScheduler] | None] = lambda: None
        # Speculator.placements when the engine was made; compared to notice moved or cast models.
        self._placements = list[tuple[Any, ...]]()
        self._is_closed = False  # set by `close`
        self._is_led = False  # this service's batcher leads the model's processes; see Ranks
        self._index = itertools.count()
        self._lock = FairLock()

    # ---- life cycle

    def start(self) -> None:
        """Start the batcher unless it is running.

        All processes of a tensor-parallel model must call this.

        Raises:
            SLOSpecError: as raised by :meth:`set_up`.
        """
        with self._lock:
            batcher = self.set_up()
            if not batcher.is_running:
                self._end_leading()
            batcher.start()

    def set_up(self) -> Batcher | Follower:
        """Check the model, and create the batcher without starting it, unless that was done.

        Raises:
            UnsupportedModelError: the model is an encoder-decoder, or speculation does not support
                it and only stock ``generate`` can run it.
            UnsupportedOptionError: the draft model is split over processes.
            UnsupportedInputError: every request would fail because of the model's generation
                config.
            NotRunningError: :meth:`close` was called.
        """
        with self._lock:
            self.check_open()
            if self._batcher is None:
                check_decoder_only(self.decoder.model, "the batcher")
                speculator = self.decoder.speculator
                ranks = speculator.target.ranks
                ranks.check_draft(speculator)
                self._check_defaults()
                kv_tokens = self.config.kv_tokens
                if kv_tokens is None:
                    kv_tokens = ranks.least(speculator.affordable_kv_tokens())
                self._limits = limits_of(self.config, kv_tokens, speculator.max_nodes)
                new_engine = self._new_engine
                if ranks.is_first:
                    max_queue = self.config.max_queue
                    self._batcher = Batcher(
                        new_engine, max_queue, speculator.lock, self, _batcher_thread, self._is_current,
                    )  # fmt: skip
                else:
                    self._batcher = ranks.new_follower(new_engine, speculator, _batcher_thread)
            return self._batcher

    def _check_defaults(self) -> None:
        """Prepare a request without options, so that a generation config with which every request
        would fail raises an error at the start.
        """
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.decoder.model.device)
        short = {"max_new_tokens": 1, "min_new_tokens": 0, "tokenizer": self.tokenizer}
        try:
            arguments = {"inputs": ids, "attention_mask": torch.ones_like(ids)} | short
            # The weights' bits are compared when an engine is made.
            prepare(self.decoder.speculator_of(arguments), None, arguments, is_idle=False)
        except (ValueError, TypeError) as error:
            if isinstance(error, (UnsupportedModelError, IncompatibleDraftError)):
                raise
            raise UnsupportedInputError(
                f"the generation config of {type(self.decoder.model).__name__} fails every request: {error}; set it in "
                "model.generation_config, or in generation_config.json beside the weights"
            ) from error

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Stop the batcher, and wait at most ``STREAMER_S`` seconds per streamer until streamers
        have received their remaining tokens.
        """
        if self._batcher is not None:
            try:
                self._batcher.stop(drain, timeout)
            finally:
                if not self._batcher.is_running:  # it still runs if its own thread called stop()
                    self._end_leading()
            for thread in list(self._streaming):
                if thread is not threading.current_thread():  # a streamer may stop the batcher
                    thread.join(STREAMER_S)

    def close(self, drain: bool, timeout: float | None) -> None:
        """Refuse calls from now on, and stop the batcher; see :meth:`stop`."""
        with self._lock:
            self._is_closed = True
            self.decoder.scope = "no; the generator was closed"
        self.stop(drain, timeout)

    def check_open(self) -> None:
        """Raise NotRunningError if :meth:`close` was called."""
        if self._is_closed:
            raise NotRunningError("the generator was closed; make a new one")

    @property
    def batcher(self) -> Batcher:
        """The running batcher.

        Raises:
            NotRunningError: the batcher does not run, or not in this process of a tensor-parallel
                model, or :meth:`close` was called.
        """
        self.check_open()
        if self._batcher is None:
            raise NotRunningError(
                "the batcher has not been started; call start(), or use `with generator:`"
            )
        if not isinstance(self._batcher, Batcher):
            self._batcher.refuse()
        self._batcher.check_running()
        return self._batcher

    @property
    def limits(self) -> Limits:
        """Limits of the engine (K/V slots, nodes per draft tree); set once the batcher has been
        started.
        """
        assert self._limits is not None
        return self._limits

    @property
    def max_len(self) -> int:
        """Maximum tokens of prompt and output together of one request; known once the batcher has
        been started.
        """
        return int(
            min(
                trained_len(self.decoder.model) or math.inf,
                self.limits.kv_tokens - self.limits.max_nodes,
            )
        )

    def _new_engine(self) -> Engine[ContinuousScheduler]:
        speculator = self.decoder.speculator
        slots = self.limits.kv_tokens
        ranks = speculator.target.ranks
        if ranks.number > 1 and ranks.is_led:
            raise InvalidInputError(
                "the processes of this tensor-parallel model follow a batcher, and cannot follow another or a new "
                "one; stop() it first, in all processes"
            )
        speculator.renew()
        self._placements = speculator.placements
        max_kept = math.inf if self.config.kept_tokens is None else self.config.kept_tokens or None
        target = ranks.new_target(speculator, self._samplers, slots, max_kept)
        # The drafter need not restore the global generator, as every request has its own noise.
        drafter = speculator.new_drafter(slots, max_kept, keeps_rng=False)
        # Separate averages, as the steps of concurrent generate calls have other batch sizes.
        costs = speculator.costs.for_own_engine()
        engine = new_engine(
            self.config,
            speculator.parts(target, drafter, costs, self.decoder.batcher_config),
            self.limits,
            shares_prompts=max_kept is not None,
        )
        self._engine = ref(engine)
        ranks.begin_to_lead()
        self._is_led = True
        return engine

    def _end_leading(self) -> None:
        """Let every process of a tensor-parallel model take its own decisions again, after the
        batcher has ended.
        """
        if self._is_led:
            self.decoder.speculator.target.ranks.end_leading()
            self._is_led = False

    def _is_current(self) -> bool:
        return self._placements == self.decoder.speculator.placements

    def set_policy(self, config: SLOSpecConfig) -> None:
        """Use the policy of ``config`` from the next step on.

        Raises:
            NotRunningError: :meth:`close` was called.
            InvalidInputError: the policy's draft trees may be larger than the generator's own
                config allows.
        """
        self.check_open()
        if not isinstance(self._batcher, Batcher | None):
            self._batcher.refuse()
        speculator = self.decoder.speculator
        if (needed := max_nodes_per_request(config)) > speculator.max_nodes:
            raise InvalidInputError(
                f"policy {config.policy!r} may draft {needed} tokens of a request at a time and the generator has room "
                f"for {speculator.max_nodes}; lower max_depth or max_width, or make a generator with larger ones"
            )
        with speculator.lock:  # waits for the end of a running step
            self.decoder.batcher_config = config
            if (engine := self._engine()) is not None:
                engine.policy = speculator.policy(engine.costs, config)
                engine.checks = speculator.checks(config)

    # ---- observing the batcher

    def on_step(self, step: StepEvent) -> None:
        """Count a step; the batcher calls this as its :class:`Observer`."""
        self.telemetry.on_step(step)
        if self._observer is not None:
            self._observer.on_step(step)

    def on_end(self, request: Request) -> None:
        """Count a request that has ended, and free its sampler."""
        self._samplers.pop(request, None)
        request.drop_hooks()
        self.telemetry.on_end(request)
        self.decoder.count(request)
        if self._observer is not None:
            self._observer.on_end(request)

    def stats(self) -> Stats:
        """Return a snapshot of the batcher's present load and of its counts."""
        speculator = self.decoder.speculator
        counts = Counts()
        kv_limit = 0
        memory = None
        if isinstance(self._batcher, Batcher):
            counts = self._batcher.counts
            kv_limit = self.limits.kv_tokens
            memory = speculator.memory(counts.running)
        return self.telemetry.stats(
            **counts._asdict(), kv_limit=kv_limit, memory=memory, forwards=speculator.forwards
        )

    def collector(self, prefix: str) -> Collector:
        """Return a collector for Prometheus.

        Raises:
            MissingExtraError: prometheus_client is not installed.
        """
        need("metrics", "collector")
        return Collector(lambda: self.telemetry.families(self.stats(), prefix))

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        slo_tpot: SLOTpot,
        options: SubmitOptions,
        arguments: dict[str, Any],
        images: Sequence[Any] | None = None,
        continues: RequestHandle | None = None,
    ) -> RequestHandle:
        """Prepare one request and queue it; see :meth:`SLOSpecGenerator.submit`.

        Args:
            prompt, slo_tpot, images, continues: as in :meth:`SLOSpecGenerator.submit`.
            options: the options that ``generate`` does not have.
            arguments: the arguments of ``generate``; ``streamer`` is removed.
        """
        handle, queue = self.prepared(
            self.batcher, prompt, slo_tpot, options, arguments, images, continues
        )
        queue()
        return handle

    def prepared(
        self,
        batcher: Batcher,
        prompt: Prompt,
        slo_tpot: SLOTpot,
        options: SubmitOptions,
        arguments: dict[str, Any],
        images: Sequence[Any] | None = None,
        continues: RequestHandle | None = None,
        reads_model: bool = True,
        ends_with_others: bool = False,
    ) -> tuple[RequestHandle, Callable[[], None]]:
        """Prepare one request for the batcher, which need not run yet.

        Args:
            batcher: takes the request.
            prompt, slo_tpot, options, arguments, images, continues: as in :meth:`submit`.
            reads_model: look for changes of the model. False: this was done just now, for another
                request of the same call.
            ends_with_others: all unfinished requests of the batcher are of one call, which returns
                when the last of them ends.

        Returns:
            The request's handle, and a function that queues the request.
        """
        check_arguments_of_one(arguments)
        if autocast_dtype(self.decoder.model.device.type) is not None:
            raise UnsupportedOptionError(
                "submit was called under autocast, which ends with this thread: the batcher computes in another; "
                "submit outside of it, and let Accelerator.prepare turn autocast on within the model's forward"
            )
        streamer = arguments.pop("streamer", None)
        earlier = None
        if continues is None:
            inputs = inputs_of(prompt, images, self.tokenizer, self.processor)
        else:
            inputs = inputs_after(continues, prompt, images, self.tokenizer)
            earlier = continues.metrics
            if not options.cache_salt:  # the earlier request's K/V is stored under its salt
                salt = continues.request.params.cache_salt
                options = options.model_copy(update={"cache_salt": salt})
        model = self.decoder.model
        inputs["attention_mask"] = torch.ones_like(inputs["inputs"])
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                inputs[name] = value.to(model.device)
        to_text = self._texts[options.skip_special_tokens]

        def new_stop_strings(tokenizer: Any, strings: str | Sequence[str]) -> OutputStopStrings:
            min_tokens = configured("min_new_tokens", model, arguments) or 0
            skips = options.skip_special_tokens
            texts = to_text if tokenizer is self.tokenizer else Detokenizer(tokenizer, skips)
            return OutputStopStrings(texts, strings, inputs["inputs"].shape[1], min_tokens)

        arguments = {"tokenizer": self.tokenizer} | arguments | inputs
        speculator = self.decoder.speculator_of(arguments)
        with keeping_rope_deltas(model):
            # The bits of weights are compared when an engine is made.
            is_idle = batcher.is_running and batcher.is_idle if reads_model else None
            call = prepare(
                speculator, slo_tpot, arguments, options, earlier, is_idle, new_stop_strings
            )
        speculator.lock.rest()  # preparing may have run torch in this thread, e.g. encoded images
        (params,) = call.params
        if ends_with_others:
            params = replace(
                params, ends_with_others=True, are_all_running=lambda: not batcher.counts.waiting
            )
        needed = len(params.prompt) + params.max_new_tokens + self.limits.max_nodes
        if needed > self.limits.kv_tokens:
            raise InvalidInputError(
                f"prompt of {len(params.prompt)} tokens + max_new_tokens={params.max_new_tokens} + "
                f"{self.limits.max_nodes} for speculation need {needed} tokens of K/V, and there are kv_tokens="
                f"{self.limits.kv_tokens}; lower max_new_tokens or raise SLOSpecConfig(kv_tokens=...)"
            )
        record = call.rows.record
        record.is_processed = options.processed_logprobs
        record.temperature = options.logprobs_temperature
        seed = options.seed if params.is_sampled else None
        if params.is_sampled and seed is None:
            seed = secrets.randbits(63)
        if options.resume is not None and record.num_top is not None:
            # The other engine's tokens have no recorded log probabilities.
            record.logprobs[0] += [TokenLogprobs(math.nan, [])] * len(options.resume.tokens)
        is_plain = not (params.is_sampled or call.stock.processors or record.is_wanted)
        sampler = None if is_plain else call.sampler(seed, sharing=self.config.max_batch)
        new_noise = None if sampler is None else partial(call.noise_of, sampler)
        request = Request(next(self._index), params, call.arrived_s, options.resume, new_noise)
        reader = params.prompt_reader
        handle = RequestHandle(
            request,
            None if self.tokenizer is None else to_text,
            batcher.abort,
            seed,
            record.logprobs[0],
            [] if reader is None else reader.logprobs,
        )
        handle.has_images = call.has_images

        def queue() -> None:
            if sampler is not None:
                self._samplers[request] = sampler
            try:
                batcher.submit(handle, options.block, options.timeout)
            except BaseException:
                self._samplers.pop(request, None)
                raise
            if streamer is not None:
                thread = threading.Thread(
                    target=_stream, args=(handle, call.rows.input_ids, streamer), daemon=True
                )
                self._streaming.add(thread)
                thread.start()

        return handle, queue


@contextlib.contextmanager
def _batcher_thread() -> Iterator[None]:
    with torch.no_grad():
        yield
    return_freed_memory()


def _stream(handle: RequestHandle, prompt: torch.Tensor, streamer: Any) -> None:
    """Pass a request's tokens to its streamer. Runs in a thread of its own, so that a slow streamer
    delays no step.
    """
    try:
        try:
            streamer.put(prompt.cpu())
            for token in handle.tokens():
                streamer.put(torch.tensor([token], device="cpu"))
        finally:
            streamer.end()
    except Exception as error:  # noqa: BLE001  an error of the streamer fails its request, unless that is done
        if (
            handle.done()
            and error is not handle.request.error
            and not isinstance(error, RequestCancelledError)
        ):
            logger.warning(
                "the streamer of request %d raised after its end: %r", handle.request.index, error
            )
        handle.fail(error)
