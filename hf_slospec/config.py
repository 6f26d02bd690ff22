"""Settings of speculation and of the batcher. Defaults are defined only here, in the policies'
settings (policies/settings.py) and in their options.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Policy
from hf_slospec.policies.settings import MAX_COUNT, PolicySettings
from hf_slospec.scheduler import AdmissionName, PrefillName

# Largest prefill_chunk, in tokens. It is bounded because the scheduler predicts the step time of
# every chunk size up to prefill_chunk.
MAX_PREFILL_CHUNK = 10**6

Compile = bool | Literal["wait"]
Exact = Literal["bits", "self"] | None


class SLOSpecConfig(PolicySettings):
    """Settings of speculation and of the batcher. Frozen; unknown fields are refused.

    Raises:
        InvalidInputError: a setting has an invalid value, or there is no such setting.
    """

    attention: Literal["auto", "sdpa", "4d_mask", "flash", "triton"] = Field(
        "auto",
        description="Tree attention. sdpa: torch's, one call per request. triton: a kernel of our own (CUDA); "
        "flash: flash-attention kernels (FlashAttention 2 to 4 or torch's own; CUDA, bf16 or fp16); both use "
        "sdpa for layers they do not support. 4d_mask: the model's own, given one mask for the whole batch. auto: the "
        "faster of triton and flash for each shape of layers by a trial, or sdpa where neither works.",
    )
    coupling: bool = Field(
        True,
        description="Sampled requests: draft with the noise that will choose the target's tokens, so that more drafts "
        "are accepted. The tokens are the same without it.",
    )
    prepack: bool | None = Field(
        None,
        description="CPU: keep a second copy of the weights of linear layers, packed for the fastest kernel of "
        "this CPU: faster steps for up to twice the models' memory. None: where the copies take at most a quarter of "
        "the free memory.",
    )
    weights: str = Field(
        "auto",
        pattern=r"^(auto|keep|int8|int4|.+\.gguf)$",
        description="CPU: which weights of linear layers and embeddings are replaced in place by weights that stay "
        "packed, for kernels that multiply with them as they are. auto: those that torchao has quantised or "
        "transformers read from a GGUF file, with the same values. A path that ends in .gguf: the file that the target "
        "was loaded from, where auto does not find it (transformers 5.23; Qwen3.5 and LFM2). int8, int4: linear layers "
        "of a target and draft in fp32, fp16 or bf16 are quantised: faster steps of less memory, but another model, "
        "whose text differs. keep: none.",
    )
    cuda_graphs: bool = Field(
        True,
        description="CUDA with attention by triton or flash: capture forwards of up to 640 tokens that recur, and "
        "replay them. Takes up to a sixteenth of the device's memory for each model.",
    )
    fused_layers: bool = Field(
        True,
        description="CUDA in bf16 or fp16: compute norms, rotary embeddings and gated activations of packed forwards "
        "by one kernel each, and projections of the same inputs by one for all where that is measured to be faster. A "
        "trial must give the same as the model's own layers up to rounding.",
    )
    compile: Compile = Field(
        True,
        description="CPU on Linux with a C++ compiler: compute forwards by a graph that torch's compiler makes once "
        "per machine and kind of model. True: a process of lower priority makes it after some seconds of use, and goes "
        "on if this one ends; until then, forwards do without. wait: before the first forward. False: never.",
    )
    exact: Exact = Field(
        None,
        description="What holds in bf16, too, bit for bit; output in fp32 is exact without it. bits, on CPUs only: the "
        "output is that of stock generate for each row alone. self: it is always the same, whatever the drafts, the "
        "batch, other requests, chunks of prompts and preemption. Refused where the machine or model cannot have it.",
    )
    admission: AdmissionName = Field(
        "slo",
        description="Batcher: which requests get their SLOs guaranteed. slo: those whose SLOs can be met together with "
        "the others', by SLOs-Serve's dynamic programme. edf, fcfs: all, served earliest deadline first or in order of "
        "arrival. priority: all, and requests with a lower number preempt those with a higher one (vLLM's priority "
        "scheduling).",
    )
    prefill: PrefillName = Field(
        "beside",
        description="Batcher: when prompts are prefilled. beside: together with decoding, as much as makes no "
        "guaranteed request late. first: before any decoding (vLLM without chunked prefill). chunked: together with "
        "decoding, up to prefill_chunk tokens per step, decoding included (Sarathi-Serve).",
    )
    guarantee: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Probability with which a guaranteed request meets its TTFT SLO, and its TPOT SLO over every "
        "window of ten tokens. The part of SLOs that is planned with follows from how steps and requests vary, and "
        "from the guarantees kept so far. None: the mean TPOT over all tokens is planned, with 95 % of each TPOT SLO "
        "and 85 % of each TTFT SLO, so that as many requests as possible meet theirs; no probability is stated.",
    )
    max_batch: int = Field(
        64, ge=1, le=MAX_COUNT, description="Batcher: maximum number of running requests."
    )
    max_queue: int = Field(
        1024,
        ge=1,
        le=MAX_COUNT,
        description="Batcher: maximum number of waiting requests; more are refused.",
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Batcher: maximum tokens of K/V cache. None: as many as fit into two fifths of the free memory.",
    )
    kept_tokens: int | None = Field(
        None,
        ge=0,
        description="Batcher: tokens of finished requests whose K/V is kept for requests that begin alike, at most. "
        "None: as many as running requests leave of kv_tokens. 0: none, and no request uses another's K/V.",
    )
    prefill_chunk: int = Field(
        512, ge=1, le=MAX_PREFILL_CHUNK, description="Batcher: maximum prefill tokens of one step."
    )
    starvation_s: float = Field(
        30.0,
        gt=0,
        description="Batcher: seconds after which a waiting request precedes all others, guaranteed or not.",
    )
    check_invariants: bool = Field(
        False,
        description="Verify trees and K/V cache book-keeping at every step (slow; for tests).",
    )

    @model_validator(mode="before")
    @classmethod
    def _replace_deterministic(cls, data: Any) -> Any:
        """Replace the deprecated ``deterministic``; an explicit ``exact`` takes precedence."""
        if not isinstance(data, dict) or not isinstance(data.get("deterministic"), bool):
            return data
        warnings.warn(
            'deterministic is deprecated and will be removed; use exact="self", which '
            "deterministic=True now stands for",
            FutureWarning,
            stacklevel=4,
        )
        rest = {name: value for name, value in data.items() if name != "deterministic"}
        return {"exact": "self", **rest} if data["deterministic"] else rest

    @model_validator(mode="after")
    def _decides_on_guarantees(self) -> SLOSpecConfig:
        if self.guarantee is not None and self.admission != "slo":
            raise ValueError(
                f"guarantee needs admission 'slo', as {self.admission!r} guarantees all SLOs unchecked; leave one out"
            )
        return self


# Type of the argument make_policy: a function that returns a user's policy.
NewPolicy = Callable[[SLOSpecConfig, StepCosts], Policy]
