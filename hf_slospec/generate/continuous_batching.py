"""``SpeculatingManager``, a manager of transformers' continuous batching whose requests are decoded
by the batcher, and the methods by which an enabled model makes and uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_slospec.batcher.batcher import Batcher
from hf_slospec.batcher.handle import RequestHandle
from hf_slospec.batcher.service import BatchingService
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.errors import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    SLOSpecError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.forks import Condition
from hf_slospec.generate.arguments import configured
from hf_slospec.generate.call import Decoder
from hf_slospec.generate.speculator import FREE_SHARE
from hf_slospec.model.version import ModelVersion
from hf_slospec.policies.settings import MAX_COUNT
from hf_slospec.request.params import SubmitOptions
from hf_slospec.request.request import Request
from hf_slospec.request.state import RequestState

logger = logging.getLogger(__name__)
POLL_S = 0.1  # seconds between two looks whether the batcher has ended
QUEUE_S = 10.0  # seconds that a request waits for room in the queue, as in transformers
CACHED = "_cached_continuous_batching_manager"  # attribute of a model whose manager was kept
METHODS = ("generate_batch", "init_continuous_batching")  # methods of a model that enable() sets
# Fields of ContinuousBatchingConfig that are read, or that hold whatever their value.
READ = {
    "allow_block_sharing",
    "auto_switch_to_flash",  # speculation has its own attention and leaves the model's as it is
    "block_size",  # deprecated name of page_size
    "cpu_group_timeout",  # of transformers' own process groups
    "disable_nccl_graph_mixing",
    "drop_unsupported_processors",  # none is unsupported
    "max_batch_tokens",
    "max_cached_graphs",  # deprecated, without effect in transformers
    "max_memory_percent",
    "max_queue_size",
    "max_requests_per_batch",
    "num_blocks",
    "page_size",
    "per_request_processors",  # always
    "return_logprobs",
    "scheduler_type",
    "seed",
    "use_cuda_graph",
    "use_default_compile_configs",  # deprecated name of default_compile_level
}
PREFILL = {"fifo": "beside", "prefill_first": "first"}  # scheduler_type -> SLOSpecConfig.prefill
# Settings of a GenerationConfig that concern outputs and caches which a request does not have.
WITHOUT = {
    "cache_implementation": None,
    "num_return_sequences": 1,
    "output_logits": False,
    "output_scores": False,
    "return_dict_in_generate": False,
    "use_cache": True,
}
NO_LIST = "inputs must be a list with one list of token ids per prompt, got {}"
LISTS = ("slo_tpot", "slo_ttft", "priority")  # may have one value per prompt
# Arguments that model.generate(cache_implementation="paged") passes on to generate_batch.
OF_GENERATE = {"cache_implementation", "input_ids", "use_cache"}


@dataclass
class ScoredBatching(ContinuousBatchingConfig):
    """Settings of ``generate_batch`` calls whose log probabilities a trainer uses."""

    # Log probabilities are those of the logits divided by this, before other logits processors.
    temperature: float = 1.0
    # Takes the outputs of each call, and the version of the model that made them.
    take: Callable[[Iterable[GenerationOutput], ModelVersion], None] | None = None


def batcher_config(
    given: ContinuousBatchingConfig, config: SLOSpecConfig, decoder: Decoder
) -> SLOSpecConfig:
    """Return the batcher's settings for a :class:`ContinuousBatchingConfig`.

    Args:
        given: transformers' settings.
        config: the settings of the enabled model, which apply to all that ``given`` leaves open.
        decoder: the models.

    Raises:
        InvalidTypeError: ``given`` is of another class.
        InvalidInputError: there is no such scheduler, or a number is out of range.
        UnsupportedOptionError: fields were set that speculation cannot follow; all are named.
    """
    if not isinstance(given, ContinuousBatchingConfig):
        raise InvalidTypeError(
            "continuous_batching_config must be a ContinuousBatchingConfig, got "
            f"{type(given).__name__}"
        )
    defaults = ContinuousBatchingConfig()
    # False and 0 turn something off that speculation does not have.
    refused = [
        one.name
        for one in fields(defaults)
        if one.name not in READ and getattr(given, one.name) not in (getattr(defaults, one.name), 0)
    ]
    has_choice = given.use_cuda_graph is not None and decoder.model.device.type == "cuda"
    if has_choice and set(given.cuda_graph_booleans) != {config.cuda_graphs}:
        refused.append("use_cuda_graph")
    if refused:
        raise UnsupportedOptionError(
            f"continuous_batching_config sets {', '.join(refused)}, which speculation does not have; leave it out "
            "(graphs, compiled forwards and attention are settings of SLOSpecConfig, see enable), or pass "
            "fallback=True to enable"
        )
    if given.scheduler_type not in PREFILL:
        raise InvalidInputError(
            f"scheduler_type must be one of {', '.join(PREFILL)}, got {given.scheduler_type!r}"
        )
    changes: dict[str, Any] = {"max_queue": given.max_queue_size or MAX_COUNT}
    if given.max_requests_per_batch is not None:
        changes["max_batch"] = given.max_requests_per_batch
    if given.max_batch_tokens is not None:
        changes["prefill_chunk"] = given.max_batch_tokens
    if given.num_blocks is not None:
        changes["kv_tokens"] = given.num_blocks * given.page_size
    elif config.kv_tokens is None and (given.max_memory_percent or 1.0) < FREE_SHARE:
        share = float(given.max_memory_percent or 1.0) / FREE_SHARE
        changes["kv_tokens"] = max(int(decoder.speculator.affordable_kv_tokens() * share), 1)
    if not given.allow_block_sharing:
        changes["kept_tokens"] = 0
    if given.scheduler_type != defaults.scheduler_type:
        changes["prefill"] = PREFILL[given.scheduler_type]
    return SLOSpecConfig(**dict(config) | changes)


@dataclass
class ManagedRequest:
    """A request of a manager, from ``add_request`` to its end."""

    request_id: str
    handle: RequestHandle
    queue: Callable[[], None]  # passes the request to the batcher
    streaming: bool
    record_timestamps: bool
    created_time: float = field(default_factory=time.perf_counter)  # seconds

    def output(self) -> GenerationOutput:
        """Return the output so far; called by the batcher's thread."""
        request = self.handle.request
        stats = request.stats
        new = request.tokens[request.prompt_len :]
        times_s = list[float]()
        for commit in stats.commits:
            times_s += [commit.at_s] * (commit.num_emitted - len(times_s))
        error = None if request.error is None else str(request.error)
        status = RequestStatus.DECODING
        if request.state in (RequestState.STOP, RequestState.LENGTH):
            status = RequestStatus.FINISHED
        elif request.is_finished:
            status = RequestStatus.FAILED
            error = error or f"request {self.request_id} was cancelled"
        entered_s = -1.0 if stats.entered_s is None else stats.entered_s
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=list(request.params.prompt),
            generated_tokens=new,
            logprobs=[one.logprob for one in self.handle.recorded[: len(new)]],
            error=error,
            status=status,
            created_time=self.created_time,
            lifespan=(entered_s, time.perf_counter() if request.is_finished else -1.0),
            timestamps=times_s if self.record_timestamps else None,
        )


class SpeculatingManager(ContinuousBatchingManager):
    """Takes requests and returns outputs as transformers' manager does, and decodes them by
    speculation. An enabled model's ``init_continuous_batching`` returns it.

    Every output is that of stock ``generate`` for its prompt alone, with the settings of
    ``generation_config`` and, where that leaves them open, of the model's. A sampled one is that
    after ``torch.manual_seed(seed + n)``, where ``seed`` is that of ``continuous_batching_config``
    and n counts the requests of this manager from 0; without it, each request's seed is drawn
    from torch's generator.
    """

    def __init__(
        self,
        decoder: Decoder,
        generation_config: GenerationConfig | None,
        continuous_batching_config: ContinuousBatchingConfig,
    ):
        """Take the settings of all requests, and put the model into evaluation mode, as
        transformers' manager does.

        Raises:
            SLOSpecError: as raised by :func:`batcher_config` and ``SLOSpecGenerator.start``.
        """
        if not isinstance(generation_config, (GenerationConfig, type(None))):
            raise InvalidTypeError(
                f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}"
            )
        # The base class is not initialised: it makes the K/V cache and thread of its own loop.
        config = batcher_config(continuous_batching_config, decoder.config, decoder)
        self.model: Any = decoder.model.eval()
        self.generation_config = generation_config or self.model.generation_config
        self.continuous_batching_config = continuous_batching_config
        self.batch_processor = None  # there is none; transformers' code looks at it
        self.warmed_up = False
        settings = {} if generation_config is None else {"generation_config": generation_config}
        self.num_return_sequences = configured("num_return_sequences", self.model, settings) or 1
        self._given = GenerationConfig() if generation_config is None else generation_config
        self._service = BatchingService(decoder, decoder.tokenizer, config=config, observer=self)
        self._batcher: Any = self._service.set_up()  # a Batcher, or a Follower of another process
        self.is_tp_driver = isinstance(self._batcher, Batcher)
        self._requests: dict[int, ManagedRequest] = {}  # unfinished ones, by Request.index
        self._held = list[ManagedRequest]()  # added before start()
        # The thread in which stop() runs; the base class's join() waits for it.
        self._generation_thread: Any = None
        self._seed = continuous_batching_config.seed
        self.is_stopped = False  # takes no requests until it is started again
        self.is_of_call = False  # a call of generate_batch adds all requests
        self._num_named = 0  # requests without a name of their own so far
        self._num_added = 0
        self._changed = Condition()  # guards all that follows
        self._outputs: dict[str, deque[GenerationOutput]] = {}  # not yet fetched, by request_id
        self._handlers: dict[
            str, tuple[Callable[[GenerationOutput], Any], asyncio.AbstractEventLoop]
        ] = {}

    # ---- life cycle

    @property
    def background_thread_status(self) -> BackgroundThreadStatus:  # type: ignore[override]
        """Status whose ``fatal_error`` says why the batcher has ended by itself, if it has."""
        status = BackgroundThreadStatus()
        if self._generation_thread is None and self.warmed_up and self.is_tp_driver:
            try:
                self._batcher.check_running()
            except NotRunningError as error:
                status.record_fatal_error(error)
        return status

    def warmup(self) -> None:
        """Measure the models' step times, unless they are known. ``start`` does so, too."""
        _ = self._service.decoder.speculator.costs

    def is_running(self) -> bool:
        """Return whether the batcher's thread is alive."""
        return bool(self._batcher.is_running)

    def start(self) -> None:
        """Start the batcher, and decode the requests added so far."""
        if self._generation_thread is not None:
            self._generation_thread.join()
        self._service.start()
        self._generation_thread = None
        self.warmed_up = True
        self.is_stopped = False
        held, self._held = self._held, []
        for request in held:
            request.queue()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests and finish the present ones.

        Args:
            block: wait until they are finished.
            timeout: seconds to wait at most; the batcher goes on afterwards. None: without limit.
            keep_for_next_session: keep this manager for the model's next
                ``init_continuous_batching``.
            hard_stop: cancel the present requests; their outputs have the status FAILED.

        Raises:
            NotRunningError: called in a ``pause`` of the same thread, or by the batcher's thread.
        """
        if not self.is_running():
            logger.warning("the manager is not running")
            return
        if self.is_tp_driver:
            self._batcher.check_may_stop()
        self.is_stopped = True
        begun_s = time.perf_counter()
        self._generation_thread = threading.Thread(
            target=self._service.stop, args=(not hard_stop, None), daemon=True
        )
        self._generation_thread.start()
        if keep_for_next_session:
            setattr(self.model, CACHED, self)
        if block:
            self.join(begun_s, timeout)

    def destroy(self) -> None:
        """Stop the manager for good. May be called several times."""
        if self.is_running():
            self.stop()
        self.is_stopped = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run no step within this context, for example to change the model's weights in place.
        Requests wait and keep their K/V. Several threads may be in it at the same time.

        Raises:
            NotRunningError: the manager is not running.
        """
        with self._service.batcher.paused():
            yield

    # ---- requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **settings: Any,
    ) -> str | None:
        """Queue one request, or ``num_return_sequences`` of them; may be called from any thread,
        and before ``start``.

        Args:
            input_ids: token ids of the prompt.
            request_id: name of the request; None: ``req_0``, ``req_1``, ... Of several sequences,
                all but the last are named ``{request_id}__child#{i}``.
            max_new_tokens: tokens to generate at most; None: as the generation config says.
            streaming: deliver an output after every step, with all tokens so far.
            record_timestamps: record the time of every token.
            eos_token_id: tokens that end the request; None: as the generation config says.
            settings: further settings of this request: ``slo_tpot``, ``slo_ttft``, ``priority``,
                ``seed`` and other options of ``SLOSpecGenerator.submit``, fields of a generation
                config (``temperature``, ...) and arguments of ``generate``
                (``logits_processor``, ...).

        Returns:
            The request's name; None in all processes of a tensor-parallel model but the first.

        Raises:
            NotRunningError: the manager was stopped.
            QueueFull: ``max_queue_size`` requests have been waiting for 10 s.
            InvalidInputError, InvalidTypeError, UnsupportedOptionError: an argument cannot be
                served; running requests are not disturbed.
        """
        settings |= {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        if not self.is_tp_driver:
            return None
        prepared = self._prepared(input_ids, request_id, streaming, record_timestamps, settings)
        self._queue(prepared)
        return prepared[-1].request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Queue a request per prompt, after all of them were checked; see :meth:`add_request`.

        Args:
            inputs: the prompts.
            max_new_tokens, streaming, record_timestamps: apply to all requests.
            settings: apply to all requests, too, but ``slo_tpot``, ``slo_ttft`` and ``priority``
                may be lists with one entry per prompt.

        Returns:
            The requests' names, in the order of the prompts.
        """
        if not isinstance(inputs, (list, tuple)):
            raise InvalidTypeError(NO_LIST.format(type(inputs).__name__))
        if not self.is_tp_driver:
            return []
        settings["max_new_tokens"] = max_new_tokens
        lists = {name: settings.pop(name) for name in LISTS if _is_list(name, settings, inputs)}
        added = list[ManagedRequest]()
        names = list[str]()
        for row, input_ids in enumerate(inputs):
            its = settings | {name: values[row] for name, values in lists.items()}
            try:
                added += self._prepared(
                    input_ids, None, streaming, record_timestamps, its, not added
                )
            except SLOSpecError as error:
                raise type(error)(f"inputs[{row}]: {error}") from error
            names.append(added[-1].request_id)
        self._queue(added)
        return names

    def _prepared(
        self,
        input_ids: list[int],
        request_id: str | None,
        streaming: bool,
        record_timestamps: bool,
        settings: dict[str, Any],
        is_first: bool = True,
    ) -> list[ManagedRequest]:
        """Return the requests for one prompt, all sequences to return, which are not queued.

        Args:
            input_ids, request_id, streaming, record_timestamps: as in :meth:`add_request`.
            settings: its other arguments.
            is_first: no other prompt of the same call was prepared before.
        """
        if self.is_stopped:
            raise NotRunningError("the manager was stopped; call start(), or make a new one")
        if isinstance(input_ids, str):
            raise InvalidTypeError("input_ids must be token ids, got a text; tokenize it first")
        with self._changed:
            if request_id is None:
                request_id = f"req_{self._num_named}"
                self._num_named += 1
            elif any(one.request_id == request_id for one in self._requests.values()):
                raise InvalidInputError(f"request_id {request_id!r} is that of a running request")
            number = self._num_added
            self._num_added += self.num_return_sequences
        children = [f"{request_id}__child#{i}" for i in range(self.num_return_sequences - 1)]
        prepared = list[ManagedRequest]()
        for i, name in enumerate((*children, request_id)):
            handle, queue = self._prepared_one(input_ids, number + i, settings, is_first and not i)
            prepared.append(ManagedRequest(name, handle, queue, streaming, record_timestamps))
        return prepared

    def _prepared_one(
        self,
        input_ids: list[int],
        number: int,
        settings: dict[str, Any],
        is_first: bool,
    ) -> tuple[RequestHandle, Callable[[], None]]:
        config = copy.copy(self._given)
        options: dict[str, Any] = {"block": True, "timeout": QUEUE_S}
        arguments: dict[str, Any] = {"generation_config": config}
        for key, value in WITHOUT.items():
            setattr(config, key, value)
        for key, value in settings.items():
            if hasattr(config, key) and key not in WITHOUT:
                if isinstance(value, dict):  # the constructor makes other objects of some
                    value = getattr(GenerationConfig(**{key: value}), key)
                if value is not None:
                    setattr(config, key, value)
            else:
                is_option = key in SubmitOptions.model_fields
                (options if is_option else arguments)[key] = value
        slo_tpot = arguments.pop("slo_tpot", None)
        if options.get("seed") is None and configured("do_sample", self.model, arguments):
            options["seed"] = (
                int(torch.randint(2**63 - 1, (), device="cpu"))
                if self._seed is None
                else (self._seed + number) % 2**63
            )
        batching = self.continuous_batching_config
        if isinstance(batching, ScoredBatching):
            options |= {"logprobs": 0, "logprobs_temperature": batching.temperature}
        elif batching.return_logprobs:
            options |= {"logprobs": 0, "processed_logprobs": True}
        submitted = SubmitOptions.of(**options)
        return self._service.prepared(
            self._batcher, input_ids, slo_tpot, submitted, arguments, reads_model=is_first,
            ends_with_others=self.is_of_call,
        )  # fmt: skip

    def _queue(self, requests: Sequence[ManagedRequest]) -> None:
        """Pass requests to the batcher, or hold them until it is started."""
        with self._changed:
            self._requests |= {one.handle.request.index: one for one in requests}
        if not self.is_running():
            self._held += requests
            return
        for number, request in enumerate(requests):
            try:
                request.queue()
            except BaseException:
                with self._changed:
                    for one in requests[number:]:
                        self._requests.pop(one.handle.request.index, None)
                raise

    def cancel_request(self, request_id: str) -> None:
        """End a request before the next step; its output has the status FAILED. Does nothing if
        no such request is unfinished.
        """
        with self._changed:
            named = [one for one in self._requests.values() if one.request_id == request_id]
        for one in named:
            if one in self._held:
                self._held.remove(one)
                one.handle.request.end(None)
                self.on_end(one.handle.request)
            else:
                one.handle.cancel()

    # ---- outputs

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Wait for the next output, of one request or of any, and return it.

        Returns:
            None if there is none within ``timeout`` seconds, or if none can come any more.
        """
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                name = next(iter(self._outputs), None) if request_id is None else request_id
                if name in self._outputs:
                    output = self._outputs[name].popleft()
                    if not self._outputs[name]:
                        del self._outputs[name]
                    return output
                left_s = min(until_s - time.monotonic(), POLL_S)
                if left_s <= 0 or not self.is_running():
                    return None
                self._changed.wait(left_s)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come, until the manager is stopped."""
        while self.is_running() or self._outputs:
            if (output := self.get_result(timeout=POLL_S)) is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Yield the outputs of one request as they come, until it is finished."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], Any]
    ) -> None:
        """Pass each output of a request to ``callback`` in the running event loop, instead of
        keeping it for ``get_result``, until the request is finished.
        """
        loop = asyncio.get_running_loop()
        with self._changed:
            outputs = self._outputs.pop(request_id, ())
            if not any(output.is_finished() for output in outputs):
                self._handlers[request_id] = callback, loop
            for output in outputs:
                loop.call_soon(callback, output)

    def _deliver(self, output: GenerationOutput) -> None:
        with self._changed:
            if output.request_id in self._handlers:
                callback, loop = self._handlers[output.request_id]
                if output.is_finished():
                    del self._handlers[output.request_id]
                with contextlib.suppress(RuntimeError):  # the event loop was closed
                    loop.call_soon_threadsafe(callback, output)
            else:
                self._outputs.setdefault(output.request_id, deque()).append(output)
                self._changed.notify_all()

    def on_step(self, step: StepEvent) -> None:
        """Pass on the new tokens of streaming requests. Runs in the batcher's thread."""
        for part in step.requests:
            one = self._requests.get(part.index)
            if one is not None and one.streaming and not one.handle.request.is_finished:
                self._deliver(one.output())

    def on_end(self, request: Request) -> None:
        """Pass on the output of a request that has ended. Runs in the batcher's thread."""
        with self._changed:
            one = self._requests.pop(request.index, None)
        if one is not None:
            self._deliver(one.output())


def _is_list(name: str, settings: dict[str, Any], inputs: Sequence[Any]) -> bool:
    """Return whether a setting has one value per prompt."""
    value = settings.get(name)
    if not isinstance(value, (list, tuple)):
        return False
    if len(value) != len(inputs):
        raise InvalidInputError(
            f"{name} has {len(value)} entries for {len(inputs)} prompts; give one for all, or one entry per prompt"
        )
    return True


def batching_methods(decoder: Decoder) -> dict[str, Callable[..., Any]]:
    """Return the methods that :func:`enable` sets on a model, by name."""
    stock: Any = type(decoder.model)

    def new_manager(
        model: Any,
        generation_config: GenerationConfig | None,
        given: ContinuousBatchingConfig | None,
    ) -> SpeculatingManager | None:
        """Return a manager, or the one that was kept; None if stock's is to run instead."""
        if model is not decoder.model:  # a deep copy, which copied its methods
            return None
        if isinstance(cached := getattr(model, CACHED, None), SpeculatingManager):
            cached.is_stopped = cached.is_of_call = False
            model.eval()
            return cached
        given = given or getattr(generation_config, "continuous_batching_config", None)
        try:
            return SpeculatingManager(
                decoder, generation_config, given or ContinuousBatchingConfig()
            )
        except (UnsupportedModelError, UnsupportedOptionError, IncompatibleDraftError) as error:
            if not decoder.fallback:
                raise
            reason = f"stock continuous batching runs instead: {error}"
            warnings.warn(reason, FallbackWarning, stacklevel=5)
            return None

    @functools.wraps(stock.init_continuous_batching)
    @torch.no_grad()
    def init_continuous_batching(
        self: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        manager = new_manager(self, generation_config, continuous_batching_config)
        if manager is not None:
            return manager
        stocks: ContinuousBatchingManager = stock.init_continuous_batching(
            self, generation_config, continuous_batching_config, workload_hints
        )
        return stocks

    @functools.wraps(stock.generate_batch)
    @torch.no_grad()
    def generate_batch(
        self: Any,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **settings: Any,
    ) -> dict[str, GenerationOutput]:
        if not isinstance(inputs, (list, tuple)):
            raise InvalidTypeError(NO_LIST.format(type(inputs).__name__))
        if not inputs:
            return {}
        manager = new_manager(self, generation_config, continuous_batching_config)
        if manager is None:
            outputs: dict[str, GenerationOutput] = stock.generate_batch(
                self, inputs, generation_config, continuous_batching_config, record_timestamps, progress_bar,
                persistent_manager, warmup, max_new_tokens=settings.get("max_new_tokens"),
            )  # fmt: skip
            return outputs
        manager.is_of_call = True
        settings = {name: value for name, value in settings.items() if name not in OF_GENERATE}
        mask = settings.pop("attention_mask", None)
        if mask is not None and not bool(torch.as_tensor(mask, device="cpu").all()):
            raise InvalidInputError(
                "attention_mask masks tokens, and generate_batch takes prompts without padding; pass lists of "
                "different lengths"
            )
        names = manager.add_requests(list(inputs), record_timestamps=record_timestamps, **settings)
        outputs = _results(manager, names, progress_bar, persistent_manager)
        batching = manager.continuous_batching_config
        if isinstance(batching, ScoredBatching) and batching.take is not None:
            batching.take(outputs.values(), decoder.speculator.target.packed.version)
        return outputs

    return {
        method.__name__: method
        for method in (init_continuous_batching, generate_batch)
        if hasattr(stock, method.__name__)
    }


def _results(
    manager: SpeculatingManager, names: list[str], progress_bar: bool, is_kept: bool
) -> dict[str, GenerationOutput]:
    """Decode the requests that were added to a manager, stop it, and return their outputs, those of
    several sequences of a prompt side by side.
    """
    last = manager.num_return_sequences - 1
    wanted = [each for n in names for each in (*(f"{n}__child#{i}" for i in range(last)), n)]
    outputs: dict[str, GenerationOutput] = {}
    is_complete = False
    manager.start()
    try:
        with tqdm(total=len(wanted), disable=not progress_bar, unit="request") as bar:
            for name in wanted:
                if (output := manager.get_result(name)) is not None:
                    outputs[name] = output
                bar.update()
        is_complete = True
    finally:
        manager.stop(keep_for_next_session=is_kept, hard_stop=not is_complete)
    for name, output in outputs.items():
        if output.error is not None:
            logger.error("request %s failed: %s", name, output.error)
    return outputs


def end_cached(model: PreTrainedModel) -> None:
    """Stop the speculating manager that a model keeps, if it keeps one, and remove it."""
    if isinstance(cached := model.__dict__.get(CACHED), SpeculatingManager):
        delattr(model, CACHED)
        cached.destroy()
