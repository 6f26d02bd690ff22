"""``SLOSpecGenerator``, which holds target model, draft and tokenizer, and offers ``generate`` and
a batcher. Submitted requests are prepared in ``batcher/service.py``.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, overload

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_slospec.batcher.handle import RequestHandle, waiting_s
from hf_slospec.batcher.service import BatchingService
from hf_slospec.batcher.stats import Collector, Stats
from hf_slospec.batcher.submission import Prompt, Texts, has_texts, inputs_of_texts
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.load_drafter import (
    Drafting,
    check_drafting,
    is_named,
    load_drafter,
    one_way_to_draft,
)
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidTypeError
from hf_slospec.generate.call import Decoder, SLOSpecOutput
from hf_slospec.generate.status import status
from hf_slospec.model.loading import check_tokenizer, hub_options, load_model
from hf_slospec.model.properties import input_device
from hf_slospec.model.record import TokenLogprobs
from hf_slospec.request.metrics import METRICS_PREFIX
from hf_slospec.request.params import SubmitOptions
from hf_slospec.request.slo import SLOTpot
from hf_slospec.request.state import Progress
from hf_slospec.scheduler.load import ReplicaLoad

HUB_ACCESS = ("token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")


class SLOSpecGenerator:
    """Generates text with tree speculation; ``model.generate`` itself stays as it is.

    Args:
        model: the target, a loaded transformers causal LM or encoder-decoder, or a PEFT model
            around one.
        assistant_model: a smaller causal LM on the same device, which drafts; or what ``drafter``
            takes. Without both, drafts are looked up in the request's own text (prompt lookup).
        tokenizer: the tokenizer of both models.
        assistant_tokenizer: the assistant model's tokenizer, if it differs from ``tokenizer``.
        config: settings; the defaults of :class:`SLOSpecConfig` if omitted.
        drafter: what drafts instead of an assistant model, see :func:`enable`.
        processor: prepares prompts with images for :meth:`submit`; without ``tokenizer``, the
            processor's tokenizer is used.
        make_policy, fallback: see :func:`enable`.

    Raises:
        InvalidTypeError, UnsupportedModelError, IncompatibleDraftError: see :func:`enable`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | Drafting | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: SLOSpecConfig | None = None,
        *,
        drafter: Drafting | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        processor: Any = None,
        make_policy: NewPolicy | None = None,
        fallback: bool = False,
    ):
        check_tokenizer(tokenizer)
        tokenizer = tokenizer or getattr(processor, "tokenizer", None)
        if processor is not None and not callable(processor):
            raise InvalidTypeError(
                "processor must be a loaded processor, such as AutoProcessor.from_pretrained(...) returns; got "
                f"{type(processor).__name__}"
            )
        self.decoder = Decoder(
            model, assistant_model, drafter=drafter, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer,
            config=config, make_policy=make_policy, fallback=fallback,
        )  # fmt: skip
        self.model = model
        self.assistant_model, _ = one_way_to_draft(assistant_model, drafter)
        self.processor = processor
        self.tokenizer = tokenizer
        self.config = self.decoder.config
        self._service = BatchingService(self.decoder, tokenizer, processor)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        assistant_model: str | None = None,
        *,
        config: SLOSpecConfig | None = None,
        drafter: Drafting | None = None,
        make_policy: NewPolicy | None = None,
        fallback: bool = False,
        dtype: torch.dtype | str = "auto",
        device_map: Any = None,
        images: bool = False,
        allow_missing: bool = False,
        **model_kwargs: Any,
    ) -> SLOSpecGenerator:
        """Load the target, its tokenizer and, if named, an assistant model, from the Hub or from
        local folders.

        Args:
            model: Hub repository or folder of the target.
            assistant_model: Hub repository or folder of the assistant model, or the name of a
                drafter, such as ``"lookup"``; None: there is none.
            config, drafter, make_policy, fallback: see :class:`SLOSpecGenerator`.
            dtype, device_map: apply to the target and to the assistant model.
            images: load the target as an image-text model, with its processor.
            allow_missing: accept checkpoints whose tensors differ from those of the model class;
                otherwise they are refused.
            model_kwargs: further arguments of ``from_pretrained`` for the target; Hub access
                (``token``, ``cache_dir``, ...) applies to the assistant model, too. With
                ``distributed_config``, the target is tensor-parallel and every process has the
                whole draft.

        Returns:
            The generator. No weight requires a gradient; call ``requires_grad_(True)`` before
            training.

        Raises:
            InvalidInputError: both a drafter and an assistant model were given.
            SLOSpecError: as raised by :func:`load_drafter` and the constructor.
        """
        check_drafting(assistant_model, drafter)
        if is_named(assistant_model):
            assistant_model, drafter = None, assistant_model
        hub = {name: model_kwargs[name] for name in HUB_ACCESS if name in model_kwargs}
        revision = {"revision": model_kwargs["revision"]} if "revision" in model_kwargs else {}
        # If the Hub is unreachable, load cached files only; retries would take most of a minute.
        if not hub.get("local_files_only"):
            for name in (model, assistant_model):
                hub |= {} if name is None else hub_options(name, hub.get("cache_dir"))
        tokenizer = AutoTokenizer.from_pretrained(model, **hub, **revision)
        processor = AutoProcessor.from_pretrained(model, **hub, **revision) if images else None
        kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
        target: Any = load_model(
            kind, model, allow_missing, dtype=dtype, device_map=device_map, **model_kwargs | hub
        )
        if (target.tp_size or 1) > 1:
            # Every process loads the whole draft, onto the device of its part of the target.
            device_map = input_device(target)
        draft = None
        if assistant_model is not None:
            draft = load_model(
                AutoModelForCausalLM,
                assistant_model,
                allow_missing,
                dtype=dtype,
                device_map=device_map,
                **hub,
            )
        if isinstance(drafter, (str, os.PathLike, list)):
            drafter = load_drafter(
                drafter, target, tokenizer=tokenizer, allow_missing=allow_missing
            )
        return cls(
            target, draft, tokenizer, config,
            drafter=drafter, processor=processor, make_policy=make_policy, fallback=fallback,
        )  # fmt: skip

    @overload
    def generate(
        self,
        inputs: torch.Tensor | Texts | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **kwargs: Any,
    ) -> SLOSpecOutput: ...

    @overload
    def generate(
        self,
        inputs: torch.Tensor | Texts | None = None,
        generation_config: None = None,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    @overload
    def generate(self, *args: Any, **kwargs: Any) -> torch.Tensor | SLOSpecOutput: ...

    def generate(
        self,
        inputs: torch.Tensor | Texts | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        slo_tpot: SLOTpot = None,
        fallback: bool | None = None,
        drafter: Drafting | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``model.generate`` with tree speculation; takes the same arguments and returns the
        same types.

        Args:
            inputs: token ids, [batch, length] or [length] int64, which may also be passed as
                ``input_ids``; batches are left-padded and have an ``attention_mask``. Or a text or
                the messages of a chat, or a list of these, which the generator's tokenizer encodes
                and pads (on the right for encoder-decoders).
            generation_config: as in ``model.generate``.
            slo_tpot: seconds per output token for all rows, or a list with one entry (or None) per
                row; None: no SLO.
            fallback: overrides the generator's setting for this call.
            drafter: drafts for this call, see :func:`enable`; submitted requests keep theirs.
            kwargs: all other arguments of ``generate``. With ``return_dict_in_generate=True``, the
                output has a field ``slo``, with one :class:`RequestMetrics` per row.

        Returns:
            What ``generate`` returns: [batch, length] int64, or a :class:`SLOSpecOutput` where
            ``generate`` would return an output object.

        Raises:
            InvalidInputError, InvalidTypeError: an argument has a wrong value or type.
            UnsupportedOptionError: an option cannot be speculated; with ``fallback`` stock
                ``generate`` runs instead.
            NotRunningError: the generator was closed.
        """
        self._service.check_open()
        positional = {"inputs": inputs, "generation_config": generation_config}
        arguments = {"tokenizer": self.tokenizer, **kwargs} | {
            k: v for k, v in positional.items() if v is not None
        }
        if has_texts(inputs):
            arguments |= inputs_of_texts(inputs, self.decoder.model, arguments)
        return self.decoder.generate(slo_tpot, arguments, fallback, drafter)

    # ---- the batcher

    def submit(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] | None = None,
        slo_tpot: SLOTpot = None,
        slo_ttft: float | None = None,
        slo_e2e: float | None = None,
        priority: int = 0,
        value: int = 1,
        best_effort: bool = False,
        speculative: bool = True,
        seed: int | None = None,
        block: bool = False,
        timeout: float | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        cache_salt: str = "",
        must_guarantee: bool = False,
        resume: Progress | None = None,
        continues: RequestHandle | None = None,
        skip_special_tokens: bool = True,
        **kwargs: Any,
    ) -> RequestHandle:
        """Queue one request for the batcher; may be called from any thread.

        The output does not depend on other running requests: it is what ``generate`` returns for
        this request alone or, if sampled, what it returns after ``torch.manual_seed(seed)``.

        Args:
            prompt: a text or chat messages (with a tokenizer), or the token ids of one request.
            images: the images of a text with placeholders, for the generator's processor. Chat
                messages contain their images; with token ids, pass the processor's tensors
                (``pixel_values``, ...) as ``kwargs``.
            slo_tpot: seconds per output token, or a list of :class:`SLOStage`; None: no SLO.
            slo_ttft: seconds from now to the first token; None: no SLO.
            slo_e2e: seconds from now to the last token; None: no SLO. The remaining time is divided
                among the tokens that remain up to ``max_new_tokens``.
            priority: requests with a lower number are guaranteed and served first, as in vLLM.
            value: 1 to 100, how much it is worth to meet the SLOs. If not all requests of a
                priority can be guaranteed, those with the largest sum of values are.
            best_effort: give no guarantee, and serve the request only with token budget that
                guaranteed requests leave over.
            speculative: False decodes this request one token per step; the output is the same.
            seed: seed of sampling; drawn at random if omitted, see ``handle.seed``.
            block: if the queue is full, wait up to ``timeout`` seconds instead of raising at once.
            timeout: seconds that ``block`` waits; None: without limit.
            logprobs: record in ``handle.logprobs``, for every new token, its log probability and
                those of this many most probable tokens at its position, before any logits
                processor; None: record nothing.
            prompt_logprobs: the same for the prompt's tokens, in ``handle.prompt_logprobs``. The
                whole prompt is then prefilled, in smaller chunks, even if K/V of its prefix is
                cached.
            cache_salt: share cached K/V of common prefixes only with requests of the same salt, so
                that latencies do not reveal what other users have sent.
            must_guarantee: end the request with NotGuaranteedError, before any work, unless its
                SLOs can be guaranteed when it arrives; see ``await handle.aguaranteed()``.
            resume: the ``handle.progress`` of a request of another generator; this request
                continues after its last token. With the same prompt, options and seed, the output
                is the same as from one generator.
            continues: the handle of a request that has ended (by a stop string, by its length, or
                cancelled). This request's prompt is the tokens of that request followed by
                ``prompt``, such as a tool's result: a text, to which no special tokens are added,
                or token ids. K/V that is still cached is reused (``metrics.reused``). SLOs count
                from now, so the pause between the requests counts in neither; ``metrics.earlier``
                holds the metrics of the earlier request, and ``metrics.guaranteed_throughout``
                tells whether both were guaranteed. Requests that continue a guaranteed request are
                preferred when guarantees are given. Options are taken from this call, except that
                ``cache_salt`` defaults to the earlier request's.
            skip_special_tokens: leave special tokens out of the text, which is also the text in
                which ``stop_strings`` are searched for.
            kwargs: all other arguments of ``generate`` for one row (``max_new_tokens``,
                ``stop_strings``, ``logits_processor``, ``streamer``, ...). As in vLLM,
                ``stop_strings`` are searched for in the output only, after ``min_new_tokens``
                tokens; in ``generate`` they may begin in the prompt.

        Returns:
            The handle of the request, which streams its tokens and returns its result.

        Raises:
            NotRunningError: the batcher does not run; call ``start()`` first, or use ``with
                generator:``.
            QueueFull: ``max_queue`` requests are waiting.
            InvalidInputError, InvalidTypeError, UnsupportedOptionError: an argument cannot be
                served; running requests are not disturbed.
        """
        options = SubmitOptions.of(
            slo_ttft=slo_ttft, slo_e2e=slo_e2e, priority=priority, value=value, best_effort=best_effort,
            seed=seed, block=bool(block), speculative=speculative, timeout=timeout, logprobs=logprobs,
            prompt_logprobs=prompt_logprobs, cache_salt=cache_salt, must_guarantee=must_guarantee, resume=resume,
            skip_special_tokens=skip_special_tokens,
        )  # fmt: skip
        return self._service.submit(prompt, slo_tpot, options, kwargs, images, continues)

    def start(self) -> SLOSpecGenerator:
        """Start the batcher unless it is running. If no profile of the models is stored, step times
        are measured first.

        All processes of a tensor-parallel model must call this; the first process then takes
        requests, and the other processes only compute.
        """
        self._service.start()
        return self

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop the batcher, which may be started again.

        It takes no new requests and finishes the present ones; after ``timeout`` seconds, or at
        once without ``drain``, it cancels them. For a tensor-parallel model, in all processes but
        the first, this waits until the first process calls it, and raises the error that ended this
        process's part.
        """
        self._service.stop(drain, waiting_s(timeout))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop the batcher for good, see :meth:`stop`; ``generate``, ``submit`` and ``start`` then
        raise NotRunningError. Does nothing if the generator is closed.
        """
        self._service.close(drain, waiting_s(timeout))

    def set_policy(self, config: SLOSpecConfig | str) -> None:
        """Use another policy from the batcher's next step on. Running requests continue.

        Args:
            config: a config with a policy and its settings, whose other settings (``max_batch``,
                ``kv_tokens``, ``admission``, ...) are ignored; or the name of a policy, which gets
                the limits of the generator's own config (``max_depth``, ``max_width``, ...).

        Raises:
            InvalidTypeError: ``config`` is neither a config nor a name.
            InvalidInputError: there is no such policy, or its draft trees may be larger than the
                generator's own config allows.
            NotRunningError: the generator was closed.
        """
        if isinstance(config, str):
            config = self.config.model_copy(update={"policy": config})
        if not isinstance(config, SLOSpecConfig):
            raise InvalidTypeError(
                "set_policy takes a SLOSpecConfig or the name of a policy, got "
                f"{type(config).__name__}"
            )
        self._service.set_policy(config)

    def __repr__(self) -> str:
        return f"<SLOSpecGenerator>\n{status(self)!r}"

    def _repr_html_(self) -> str:
        return status(self)._repr_html_()

    def __deepcopy__(self, memo: Any) -> SLOSpecGenerator:
        """Return the generator itself. Logits processors are copied for every row and may hold the
        generator, whose models must not be copied.
        """
        return self

    def __enter__(self) -> SLOSpecGenerator:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop(drain=error is None)

    async def __aenter__(self) -> SLOSpecGenerator:
        """Start the batcher without blocking the event loop."""
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.stop, drain=error is None)

    @property
    def max_len(self) -> int:
        """Maximum tokens of prompt and output together of one submitted request, once the batcher
        has been started.
        """
        return self._service.max_len

    @property
    def draft_method(self) -> DraftMethod:
        """Drafting method of calls without an ``assistant_model`` of their own."""
        return self.decoder.speculator.method

    @property
    def max_nodes(self) -> int:
        """Number of K/V slots that a submitted request needs for its draft tree, in addition to
        prompt and output.
        """
        return self._service.limits.max_nodes

    def check_running(self, hang_s: float = math.inf) -> None:
        """Raise NotRunningError, which states the reason, unless the batcher takes requests.

        Args:
            hang_s: seconds after which a step that has not ended counts as hanging.
        """
        self._service.batcher.check_running(hang_s)

    def prompt_logprobs(self, prompt: Prompt, num_top: int = 0) -> list[TokenLogprobs | None]:
        """Return the target's log probabilities of a prompt's tokens, each given the tokens before
        it; blocks until they are computed.

        Args:
            prompt: see :meth:`submit`, which also has an option ``prompt_logprobs``.
            num_top: number of most probable tokens to return at each position.

        Returns:
            One entry per token; None for the first.
        """
        handle = self.submit(prompt, prompt_logprobs=num_top, max_new_tokens=1, do_sample=False)
        handle.result()
        return handle.prompt_logprobs

    async def aload(self) -> ReplicaLoad:
        """Return the batcher's load, by which a router chooses a replica; waits for the end of the
        current step.
        """
        return await asyncio.wrap_future(self._service.batcher.load())

    def stats(self) -> Stats:
        """Return a snapshot of the batcher: its present load, and counts since it was first
        started.
        """
        return self._service.stats()

    def collector(self, prefix: str = METRICS_PREFIX) -> Collector:
        """Return a collector for ``prometheus_client.REGISTRY.register``; needs the extra
        ``metrics``.

        Metrics have vLLM's names after ``prefix``; pass ``vllm:`` for tools that look for vLLM's
        metrics.
        """
        return self._service.collector(prefix)
