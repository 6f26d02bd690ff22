"""A generator's batcher: requests that many threads submit, decoded together."""

from __future__ import annotations

import itertools
import logging
import math
import numbers
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from transformers import PreTrainedTokenizerBase

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler, Limits
from hf_slospec.engine.scheduling.pace import Pace
from hf_slospec.engine.step import Engine
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    UnsupportedOptionError,
)
from hf_slospec.generate.enable import Call, Decoder
from hf_slospec.generate.slo import SLOTpot
from hf_slospec.generate.speculator import Speculator, clock
from hf_slospec.generate.validation import check_rope_alone
from hf_slospec.models.memory import free_memory
from hf_slospec.models.sampling import RequestSamplers
from hf_slospec.policies import max_tree_nodes
from hf_slospec.serving.batcher import Batcher, Observer
from hf_slospec.serving.handle import RequestHandle
from hf_slospec.serving.telemetry import Collector, Stats, Telemetry

logger = logging.getLogger(__name__)
Prompt = str | Sequence[int] | torch.Tensor | Sequence[dict[str, Any]]
PUMP_S = 5.0  # that stopping waits for a streamer to take in what is left
FREE_SHARE = 0.4  # of the free memory for K/V; a pool that grows is there twice for a moment
NOT_FOR_ONE = (  # arguments of generate that say nothing about a single request's tokens
    "assistant_model",
    "attention_mask",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "past_key_values",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
)


class Serving(Observer):
    """Makes requests of what is submitted, and the batcher's engine of a decoder's models."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None):
        self.decoder, self.tokenizer, self.config = decoder, tokenizer, decoder.config
        self.telemetry = Telemetry()
        self._samplers = RequestSamplers()
        self._pumps: WeakSet[threading.Thread] = WeakSet()
        self._batcher: Batcher | None = None
        self._limits: Limits | None = None
        self._deciding: SLOSpecConfig | None = None  # whose policy decides, if not the generator's own
        self._engine: Callable[[], Engine | None] = lambda: None  # a weak reference: it holds all K/V
        self._index = itertools.count()
        self._lock = FairLock()

    # ---- life cycle

    def start(self) -> None:
        """Raises UnsupportedModelError where the decoder can only fall back to stock ``generate``."""
        with self._lock:
            if self._batcher is None:
                speculator = self.decoder.speculator
                self._limits = limits_of(speculator, self.config)
                self._batcher = Batcher(
                    lambda: ContinuousScheduler(
                        self.limits, Pace(speculator.costs), self.config.admission, self.config.prefill
                    ),
                    self._new_engine,
                    self.config.max_queue,
                    speculator.turns,
                    self,
                    torch.no_grad,
                )
            self._batcher.start()

    def stop(self, drain: bool, timeout: float | None) -> None:
        if self._batcher is not None:
            self._batcher.stop(drain, timeout)
            for pump in list(self._pumps):
                if pump is not threading.current_thread():  # a streamer may stop the batcher
                    pump.join(PUMP_S)

    @property
    def batcher(self) -> Batcher:
        """Raises NotRunningError."""
        if self._batcher is None:
            raise NotRunningError("the batcher has not been started; call start(), or use `with generator:`")
        self._batcher.check_running()
        return self._batcher

    @property
    def limits(self) -> Limits:
        assert self._limits is not None
        return self._limits

    def _new_engine(self, scheduler: ContinuousScheduler) -> Engine:
        speculator, slots = self.decoder.speculator, self.limits.kv_tokens
        target = speculator.new_target(self._samplers, slots)
        drafter = speculator.new_drafter(slots, keeps_rng=False)  # every request has noise of its own
        policy = speculator.policy(self._deciding)
        engine = Engine(target, drafter, policy, scheduler, clock, self.config.check_invariants)
        self._engine = ref(engine)
        return engine

    def set_policy(self, config: SLOSpecConfig) -> None:
        speculator = self.decoder.speculator
        if (needed := max_tree_nodes(config)) > speculator.max_nodes:
            raise InvalidInputError(
                f"policy {config.policy!r} may draft {needed} tokens of a request at a time and the generator has room "
                f"for {speculator.max_nodes}; lower max_depth or max_width, or make a generator with larger ones"
            )
        with speculator.turns:  # between two steps
            self._deciding = config
            if (engine := self._engine()) is not None:
                engine.policy = speculator.policy(config)

    def on_step(self, step: StepEvent) -> None:
        self.telemetry.on_step(step)

    def on_end(self, request: Request) -> None:
        self._samplers.remove(request)
        self.telemetry.on_end(request)

    def stats(self) -> Stats:
        batcher, limit = self._batcher, self._limits
        if batcher is None or limit is None:
            return self.telemetry.stats(0, 0, 0, 0, None)
        memory = self.decoder.speculator.memory(self._engine(), batcher.num_running)
        return self.telemetry.stats(batcher.num_running, batcher.num_waiting, batcher.kv_held, limit.kv_tokens, memory)

    def collector(self) -> Collector:
        return Collector(lambda: self.telemetry.families(self.stats()))

    # ---- requests

    def submit(
        self,
        prompt: Prompt,
        slo_tpot: SLOTpot,
        slo_ttft: float | None,
        priority: int,
        best_effort: bool,
        seed: int | None,
        block: bool,
        timeout: float | None,
        arguments: dict[str, Any],
    ) -> RequestHandle:
        batcher = self.batcher
        _check(slo_ttft, priority, best_effort, seed, timeout, arguments)
        streamer = arguments.pop("streamer", None)
        ids = self._ids(prompt)
        own = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        call = self.decoder.prepare(slo_tpot, {"tokenizer": self.tokenizer} | arguments | own)
        request = self._request(call, slo_ttft, priority, best_effort)
        if request.is_sampled and seed is None:
            seed = secrets.randbits(63)
        if request.is_sampled or len(call.processors) or call.rows.record.is_wanted:
            self._samplers.add(request, call.sampler(seed))
        handle = RequestHandle(request, self._to_text, batcher.abort, seed if request.is_sampled else None)
        try:
            batcher.submit(handle, block, timeout)
        except BaseException:
            self._samplers.remove(request)
            raise
        if streamer is not None:
            pump = threading.Thread(target=_pump, args=(handle, call.rows.input_ids, streamer), daemon=True)
            self._pumps.add(pump)
            pump.start()
        return handle

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        """-> [1, prompt_len] int64"""
        if isinstance(prompt, str):
            ids = self._needed_tokenizer("a text")(prompt)["input_ids"]
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, dict) for message in prompt):
            tokenizer = self._needed_tokenizer("chat messages")
            if getattr(tokenizer, "chat_template", None) is None:
                raise InvalidInputError("the tokenizer has no chat template; submit a text or token ids")
            encoded = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
            ids = encoded["input_ids"]
        else:
            ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
                ids = ids[0]
        is_ids = isinstance(ids, (list, tuple, range)) and all(type(i) is int and i >= 0 for i in ids)
        if not is_ids:
            raise InvalidTypeError(
                "prompt must be a text, token ids of one request (such as tokenizer(text)['input_ids']), or a list of "
                f"chat messages; got {type(prompt).__name__}"
            )
        if not len(ids):
            raise InvalidInputError("prompt is empty; give it at least one token")
        return torch.tensor([list(ids)], device=self.decoder.model.device)

    def _needed_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InvalidInputError(
                f"prompt is {what}, which needs a tokenizer; give SLOSpecGenerator one, or submit ids"
            )
        return self.tokenizer

    def _request(self, call: Call, slo_ttft: float | None, priority: int, best_effort: bool) -> Request:
        if len(call.rows.requests) != 1:
            raise UnsupportedOptionError("num_return_sequences must be 1; submit once per sequence, with seeds")
        (request,) = call.rows.requests
        check_rope_alone(request, self.decoder.model.config.get_text_config())
        request.index = next(self._index)
        request.ttft_slo_s, request.priority, request.is_best_effort = slo_ttft, priority, best_effort
        if (needed := self.limits.kv_needed(request)) > self.limits.kv_tokens:
            raise InvalidInputError(
                f"prompt of {request.prompt_len} tokens + max_new_tokens={request.max_new_tokens} + "
                f"{self.limits.max_nodes} for speculation need {needed} tokens of K/V, and there are kv_tokens="
                f"{self.limits.kv_tokens}; lower max_new_tokens or raise SLOSpecConfig(kv_tokens=...)"
            )
        return request

    @property
    def _to_text(self) -> Any:
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def limits_of(speculator: Speculator, config: SLOSpecConfig) -> Limits:
    """What a config allows; where it leaves K/V open, what fits into part of the free memory."""
    kv_tokens = config.kv_tokens or _affordable_kv_tokens(speculator, config.max_batch)
    return Limits.of(config, kv_tokens, speculator.max_nodes)


def _affordable_kv_tokens(speculator: Speculator, max_batch: int) -> int:
    bytes_per_token = sum(model.kv_bytes_per_token for model in speculator.models)
    device = speculator.target.packed.device
    if device.type == "cuda":  # torch keeps memory that it has freed
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = free_memory()
    most = getattr(speculator.target.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    return int(min(FREE_SHARE * free / bytes_per_token, max_batch * (most + speculator.max_nodes)))


def _check(slo_ttft: Any, priority: Any, best_effort: Any, seed: Any, timeout: Any, arguments: dict[str, Any]) -> None:
    for name, value in (("slo_ttft", slo_ttft), ("timeout", timeout)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidTypeError(f"{name} must be a number of seconds or None, got {value!r}")
        if not math.isfinite(value) or value < 0 or (name == "slo_ttft" and value == 0):
            raise InvalidInputError(f"{name} must be a positive, finite number of seconds, got {value!r}")
    for name, value in (("priority", priority), ("seed", 0 if seed is None else seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidTypeError(f"{name} must be an integer, got {value!r}")
    if not isinstance(best_effort, bool):
        raise InvalidTypeError(f"best_effort must be True or False, got {best_effort!r}")
    if seed is not None and not 0 <= seed < 2**64:
        raise InvalidInputError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
    if (streamer := arguments.get("streamer")) is not None:
        for name in ("put", "end"):
            if not callable(getattr(streamer, name, None)):
                raise InvalidTypeError(f"streamer must have a method {name!r}, got {type(streamer).__name__}")
    if given := [name for name in NOT_FOR_ONE if arguments.get(name) not in (None, False)]:
        raise UnsupportedOptionError(
            f"{', '.join(given)} cannot be given to submit, which takes one text and returns its tokens; use generate"
        )


def _pump(handle: RequestHandle, prompt: torch.Tensor, streamer: Any) -> None:
    """Hand tokens to a streamer in a thread of its own: a slow one holds up nobody, and what it raises is its own."""
    try:
        try:
            streamer.put(prompt.cpu())
            for token in handle.tokens():
                streamer.put(torch.tensor([token]))
        finally:
            streamer.end()
    except Exception as error:  # noqa: BLE001  whatever a streamer raises fails its request, if that is not over yet
        if handle.done():
            logger.warning("the streamer of request %d raised after its end: %r", handle.request.index, error)
        handle.fail(error)
