"""``SLOSpecGenerator``: target, draft and tokenizer as one object, with ``generate`` and the
batcher.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

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
from hf_slospec.batcher.submission import Prompt
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.load_drafter import Drafting, check_drafting, load_drafter
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidTypeError
from hf_slospec.generate.call import Decoder
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
    """Speculated generation without touching ``model.generate``.

    Args:
        model: the target, a loaded transformers causal LM or encoder-decoder, or a PEFT model
            around one.
        assistant_model: a smaller causal LM, on the same device. Without one, and without a
            drafter, the request's own tokens draft (prompt lookup).
        tokenizer: the tokenizer of both models.
        assistant_tokenizer: that of the assistant model, if it has another one.
        config: settings; the defaults of :class:`SLOSpecConfig` if omitted.
        drafter: as in :func:`enable`.
        processor: prepares prompts with images for :meth:`submit`; its tokenizer is used if none is
            given.
        make_policy, fallback: as in :func:`enable`.

    Raises:
        InvalidTypeError, UnsupportedModelError, IncompatibleDraftError: as in :func:`enable`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
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
        self.assistant_model = assistant_model
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
        """Load the target, the draft if one is named, and the target's tokenizer, from the Hub or
        from folders.

        With ``images``, the target is loaded as an image-text model, with its processor. ``dtype``,
        ``device_map`` and Hub access (``token``, ``cache_dir``, ...) apply to the target and the
        assistant model, further arguments to the target's ``from_pretrained``. Checkpoints whose
        tensors are not those of their class are refused unless ``allow_missing``. No weight
        requires a gradient; call ``requires_grad_(True)`` before training. With
        ``distributed_config``, the target is tensor-parallel and each process has the whole draft.

        Raises:
            InvalidInputError: there are a drafter and an assistant model.
            SLOSpecError: as :func:`load_drafter` and the constructor.
        """
        check_drafting(assistant_model, drafter)
        hub = {name: model_kwargs[name] for name in HUB_ACCESS if name in model_kwargs}
        revision = {"revision": model_kwargs["revision"]} if "revision" in model_kwargs else {}
        # An unreachable Hub would be retried for most of a minute.
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
            # For the whole draft, beside this process's part of the target.
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

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        slo_tpot: SLOTpot = None,
        fallback: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``model.generate`` with tree speculation, with or without an SLO; same arguments and
        return types.

        Args:
            inputs: [batch, length] or [length] int64, or as ``input_ids``; left-padded with an
                ``attention_mask``.
            slo_tpot: seconds per output token for all rows, or a list with one entry (or None) per
                row.
            fallback: overrides the generator's setting for this call.
            kwargs: everything else ``generate`` takes. ``return_dict_in_generate=True`` adds
                ``slo``, one :class:`RequestMetrics` per row.

        Returns:
            As ``generate`` does, [batch, length] int64, or a :class:`SLOSpecOutput` in place of its
            own class.

        Raises:
            InvalidInputError, InvalidTypeError: an argument has a wrong value or type.
            UnsupportedOptionError: an option cannot be speculated; with ``fallback`` stock
                ``generate`` runs instead.
        """
        positional = {"inputs": inputs, "generation_config": generation_config}
        arguments = {"tokenizer": self.tokenizer, **kwargs} | {
            k: v for k, v in positional.items() if v is not None
        }
        return self.decoder.generate(slo_tpot, arguments, fallback)

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

        Its output is that of ``generate`` for this request alone, whatever else runs; if sampled,
        that after ``torch.manual_seed(seed)``.

        Args:
            prompt: a text or chat messages (with a tokenizer), or token ids of one request.
            images: the images of a text with placeholders, for the generator's processor. Chat
                messages have theirs in their content; with token ids, pass the processor's tensors
                (``pixel_values``, ...) as ``kwargs``.
            slo_tpot: seconds per output token, or a list of :class:`SLOStage`; None: no SLO.
            slo_ttft: seconds from now to the first token.
            slo_e2e: seconds from now to the last token. The time that is left is shared among the
                tokens that are left, ``max_new_tokens`` in all.
            priority: requests with a lower number are guaranteed, and served, first, as with vLLM.
            value: 1 to 100, of meeting the SLOs: where not all can be guaranteed, requests of one
                priority are chosen so that the sum of their values is largest.
            best_effort: use leftover budget only, without a guarantee.
            speculative: False decodes this request one token per step; the output is the same.
            seed: seed of sampling; drawn if omitted, see ``handle.seed``.
            block: wait for room in the queue, at most ``timeout`` seconds, instead of raising at
                once.
            logprobs: record the log probability of every new token, and of so many of the most
                probable ones at its position, before any processor: ``handle.logprobs``.
            prompt_logprobs: the same for the prompt's tokens: ``handle.prompt_logprobs``. All of
                the prompt is processed, in smaller chunks, even where K/V of its beginning is kept.
            cache_salt: share the K/V of common beginnings only with requests of the same salt, so
                that latencies do not reveal what other users have sent.
            must_guarantee: end the request with NotGuaranteedError, before any work, unless its
                SLOs can be guaranteed when it arrives; see ``await handle.aguaranteed()``.
            resume: the ``handle.progress`` of a request elsewhere: this one continues after its
                last token. With the same prompt, options and seed, the output is that of one
                generator.
            continues: the handle of a request that has ended, at a stop string, at its length or
                cancelled. This one goes on behind its last token with ``prompt`` appended, such as
                a tool's result: a text, to which no special tokens are added, or ids. K/V that is
                still kept is reused (``metrics.reused``), other K/V is computed again. SLOs count
                from now, so the pause is in none; ``metrics.earlier`` has the part before it, and
                ``metrics.guaranteed_throughout`` tells whether both are guaranteed; one that
                continues a guaranteed request is preferred when guarantees are given. Options are
                those of this call, except that ``cache_salt`` is the earlier one if left out.
            skip_special_tokens: leave special tokens out of the text, in which ``stop_strings`` are
                searched for.
            kwargs: everything else ``generate`` takes for one row (``max_new_tokens``,
                ``stop_strings``, ``logits_processor``, ``streamer``, ...). ``stop_strings`` end the
                output where its text completes one after ``min_new_tokens`` tokens, as with vLLM;
                those of ``generate`` may begin in the prompt.

        Raises:
            NotRunningError: call ``start()`` first, or use ``with generator:``.
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
        """Start the batcher unless it runs. Step times are measured first if no profile is stored.

        All processes of a tensor-parallel model call it; the first one then takes requests, and the
        others compute."""
        self._service.start()
        return self

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop the batcher, which may be started again.

        It takes no more requests and finishes those it has; after ``timeout`` seconds, or without
        ``drain``, it cancels them. In other processes of a tensor-parallel model than the first, it
        waits until the first one calls it, and raises the error that ended their part.
        """
        self._service.stop(drain, waiting_s(timeout))

    def set_policy(self, config: SLOSpecConfig) -> None:
        """Use this config's policy, with its settings, from the batcher's next step on. Running
        requests continue.

        All other settings (``max_batch``, ``kv_tokens``, ``admission``, ...) stay those of the
        generator.

        Raises:
            InvalidInputError: the policy's trees may be larger than those of the generator's own
                config.
        """
        self._service.set_policy(config)

    def __deepcopy__(self, memo: Any) -> SLOSpecGenerator:
        """Return the generator itself, as its models would be copied: processors, copied per row,
        may hold it.
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

    @property
    def max_len(self) -> int:
        """Maximum tokens of prompt and output of one submitted request, once the batcher was
        started.
        """
        return self._service.max_len

    @property
    def draft_method(self) -> DraftMethod:
        """Method that drafts for the target."""
        return self.decoder.speculator.method

    @property
    def max_nodes(self) -> int:
        """Tokens of K/V that a submitted request needs beside its prompt and output, for
        speculation.
        """
        return self._service.limits.max_nodes

    def check_running(self, hang_s: float = math.inf) -> None:
        """Raise NotRunningError, which says why, unless the batcher takes requests.

        Args:
            hang_s: seconds after which a step that has not ended counts as hanging.
        """
        self._service.batcher.check_running(hang_s)

    def prompt_logprobs(self, prompt: Prompt, num_top: int = 0) -> list[TokenLogprobs | None]:
        """Return the target's log probabilities of a prompt's tokens, each given those before it;
        waits for them.

        Args:
            prompt: as for :meth:`submit`, which also has ``prompt_logprobs``.
            num_top: number of most probable tokens to return at each position.

        Returns:
            One entry per token; None for the first.
        """
        handle = self.submit(prompt, prompt_logprobs=num_top, max_new_tokens=1, do_sample=False)
        handle.result()
        return handle.prompt_logprobs

    async def aload(self) -> ReplicaLoad:
        """Return the load of the batcher for routers; waits for the end of its step."""
        return await asyncio.wrap_future(self._service.batcher.load())

    def stats(self) -> Stats:
        """Return a snapshot of the batcher: what it runs, and counts since it was first started."""
        return self._service.stats()

    def collector(self, prefix: str = METRICS_PREFIX) -> Collector:
        """Return a collector for ``prometheus_client.REGISTRY.register``; needs the extra
        ``metrics``.

        The metrics have vLLM's names behind ``prefix``, so that ``vllm:`` serves tools which look
        for those."""
        return self._service.collector(prefix)
