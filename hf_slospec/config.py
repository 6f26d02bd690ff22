"""Settings of one generator; the defaults stand here and nowhere else."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AdmissionName = Literal["slo", "edf", "fcfs", "priority"]
PrefillName = Literal["beside", "first", "chunked"]
PolicyName = Literal[
    "auto",
    "adaserve",
    "thesis",
    "thesis-slo",
    "thesis-slo-capped",
    "smartspec",
    "smartspec-requests",
    "smartspec-confidence",
    "smartspec-tree",
    "turbospec",
    "slos-serve",
    "sequoia",
    "static",
    "fixed",
    "none",
]


class SLOSpecConfig(BaseModel):
    """How requests are speculated. Frozen; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field(
        "auto",
        description="Who decides depth, width and nodes of each step. auto: what yields most expected tokens per "
        "second, those of late requests counting more. adaserve: the paper's Algorithm 2 and equations 8/9, the whole "
        "token budget on every step. thesis: trees grown and pruned to the token budget; thesis-slo: the latest "
        "requests' nodes first (thesis-slo-capped: with AdaServe's limits). smartspec, turbospec: chains as long as "
        "their goodput says, one length for all (smartspec-requests: one per request; smartspec-confidence: until the "
        "draft is unsure; smartspec-tree: trees). slos-serve: chains as long as each tier of targets needs. sequoia: "
        "the best static tree for what was accepted. static: SpecInfer's static tree of 18 nodes. fixed: beams of "
        "max_depth and max_width on every step (max_depth=0: plain decoding, max_width=1: chains). none: plain "
        "decoding.",
    )
    max_depth: int = Field(12, ge=0, description="Deepest token tree (D_max). 0 turns speculation off.")
    max_width: int = Field(3, ge=1, le=64, description="Widest beam of a request while drafting (W_max).")
    token_budget: int | None = Field(
        None,
        ge=1,
        description="Nodes verified per step at most, over all requests, roots included (B and B1). None: as many as "
        "cost up to four times a single token's step, by measurement.",
    )
    draft_budget: int = Field(96, ge=1, description="Draft tokens per level over all requests (B2), bounds the width.")
    depth_offset: int = Field(0, ge=0, description="c1 of AdaServe's equation 8: larger means shallower trees.")
    slo_order: Literal["ascending", "descending"] = Field(
        "ascending", description="Who is served first in the SLO phase, by required tokens."
    )
    urgency: float = Field(
        1.0, ge=0, description="auto: by how much a token counts more for each token its request is late."
    )
    max_slo_share: float = Field(
        1.2, gt=0, description="n_max as a multiple of an even share of the budget: the SLO phase's limit per request."
    )
    max_tree_nodes: int | None = Field(
        None, ge=1, description="thesis: nodes of one request's tree at most, its root included (S). None: no limit."
    )
    slack: float = Field(0.0, ge=0, description="thesis-slo: seconds per step to be ahead of targets by (epsilon).")
    min_confidence: float = Field(
        0.5, ge=0, lt=1, description="smartspec-confidence: a token no more probable than this is the last one drafted."
    )
    prefill_disabling: float = Field(
        0.7,
        ge=0,
        le=1,
        description="smartspec: requests that come while more than this share of the last 100 steps drafted nothing "
        "are never drafted for, which saves the draft their prompts. 1: all are drafted for.",
    )
    attention: Literal["auto", "sdpa", "4d_mask", "flash"] = Field(
        "auto",
        description="Tree attention. sdpa: torch's, one call per request. flash: flash-attention kernels (the "
        "flash-attn package or else torch's own; CUDA, bf16 or fp16), sdpa for layers they cannot do. 4d_mask: the "
        "plain reference. auto: flash where the model can use it, else sdpa.",
    )
    prepack: bool | None = Field(
        None,
        description="CPU: keep the weights of linear layers a second time, in the layout of the matrix kernels: faster "
        "steps for up to twice the models' memory. None: where that is at most a quarter of the free memory.",
    )
    cuda_graphs: bool = Field(
        True,
        description="CUDA with flash attention: capture forwards of up to 256 tokens that recur, and replay them. "
        "Takes up to a sixteenth of the device's memory for each model.",
    )
    admission: AdmissionName = Field(
        "slo",
        description="Batcher: whose targets are promised. slo: those that can be met beside the others', by "
        "SLOs-Serve's dynamic programme. edf, fcfs: everybody's, served earliest deadline first or as they come. "
        "priority: everybody's, and higher priorities take the room of lower ones (vLLM's priority scheduling).",
    )
    prefill: PrefillName = Field(
        "beside",
        description="Batcher: when prompts are fed. beside: with decoding, as much as makes no promised request late. "
        "first: before any decoding (vLLM without chunked prefill). chunked: with decoding, up to prefill_chunk "
        "tokens a step, decoding included (Sarathi-Serve).",
    )
    max_batch: int = Field(64, ge=1, description="Batcher: requests that run at a time.")
    max_queue: int = Field(1024, ge=1, description="Batcher: requests that wait at most; more are refused.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Batcher: tokens of K/V at most. None: what fits into two fifths of the free memory."
    )
    prefill_chunk: int = Field(512, ge=1, description="Batcher: prompt tokens of one step at most.")
    starvation_s: float = Field(
        30.0, gt=0, description="Batcher: a request without a promise that waited so long goes before all others."
    )
    check_invariants: bool = Field(
        False, description="Verify trees and KV book-keeping at every step (slow; for tests)."
    )
