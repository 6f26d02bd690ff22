"""The ``cuda_graphs`` forward path: pads batches to one of a few sizes, and chooses the forwards
that are replayed on each K/V pool.

``graphs.py`` captures and replays them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from hf_slospec.config import SLOSpecConfig
from hf_slospec.cuda.flash import pack
from hf_slospec.cuda.graphs import (
    BATCHES,
    BUCKETS,
    GraphCounts,
    GraphHistory,
    Graphs,
    bucket_for,
    capturer_for,
)
from hf_slospec.cuda.tree_attention import plan_tree
from hf_slospec.model.batch import MAX_DENSE, CachedSequence, NewTokens, PlannedBatch, plan_own
from hf_slospec.model.eager import EagerPath
from hf_slospec.model.inputs import ForwardInputs, ForwardTensors, Outputs, PlanKey
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.paths import Facts, ForwardPath, PathContext
from hf_slospec.model.version import ModelVersion, can_be_captured

# K/V slots for padding tokens: 128, the largest difference between two of BUCKETS, and one for each
# of 16 padding sequences.
MAX_PADDING_SLOTS = 144
MAX_CACHED = 256  # padding sequences whose tensors are kept
SHORT = 16  # tokens; attention is no faster if padding sequences are shorter


def padded(
    parts: Sequence[NewTokens], logit_rows: torch.Tensor, pool: KVPool
) -> tuple[list[NewTokens], torch.Tensor] | None:
    """Pad a batch to a size that is captured: append padding sequences, and 0 to the logit rows.

    Returns None if the batch exceeds the largest size, or needs more padding slots than the pool
    has."""
    lengths = [part.num_tokens for part in parts]
    num_padding, missing = _missing(len(parts), sum(lengths), max(lengths))
    total = sum(lengths) + missing
    if total > BUCKETS[-1] or missing > pool.num_padding_slots:
        return None
    padding = []
    start = pool.num_slots
    like = parts[0]
    for index in range(num_padding):
        length = missing * (index + 1) // num_padding - missing * index // num_padding
        padding.append(_padding_sequence(start, length, like))
        start += length
    num_rows = total if 2 * len(logit_rows) > total else bucket_for(len(logit_rows))
    if num_rows > len(logit_rows):
        logit_rows = F.pad(logit_rows, (0, num_rows - len(logit_rows)))
    return [*parts, *padding], logit_rows


def _missing(num_parts: int, num_tokens: int, longest: int) -> tuple[int, int]:
    """Return the number of padding sequences that a batch needs, and the sum of their tokens."""
    num_padding = bucket_for(num_parts, BATCHES) - num_parts
    missing = bucket_for(num_tokens + num_padding) - num_tokens
    # Attention pads all sequences to the longest, so padding sequences should not be longer than
    # the real ones.
    needed = -(-missing // max(bucket_for(longest), SHORT))
    if needed == 1 > num_padding:
        num_padding = 1  # cheaper than padding to the next size in BATCHES
    elif needed > num_padding:
        num_padding = bucket_for(num_parts + needed, BATCHES) - num_parts
    return num_padding, bucket_for(num_tokens + num_padding) - num_tokens


def _padding_sequence(start: int, length: int, like: NewTokens) -> NewTokens:
    """Return a padding sequence in slots from ``start`` on, with embeddings if ``like`` has any."""
    padding = _cached_padding(start, length, like.mask.dtype, like.mask.device)
    if like.embeds is None:
        return padding
    return replace(padding, embeds=like.embeds.new_zeros(length, like.embeds.shape[-1]))


@functools.lru_cache(maxsize=MAX_CACHED)
def _cached_padding(start: int, length: int, dtype: torch.dtype, device: torch.device) -> NewTokens:
    """Return a padding sequence without embeddings, shared by callers, which must not change it."""
    zeros = torch.zeros(length, dtype=torch.int64, device=device)
    return NewTokens(
        CachedSequence(start, length), zeros, zeros, torch.eye(length, dtype=dtype, device=device)
    )


logger = logging.getLogger(__name__)

# Functions that make attention plans whose sizes, for padded batches, do not depend on the lengths
# of the sequences.
REPLAYABLE = {pack, plan_tree, plan_own}


NO_LOGITS = torch.empty(0, device="cpu")


class CudaGraphPath(ForwardPath):
    """Forward path that captures packed forwards which recur, and replays their CUDA graphs."""

    name = "cuda_graphs"
    order = 10

    def __init__(self, context: PathContext, eager: ForwardPath):
        assert isinstance(eager, EagerPath)
        self._eager = eager
        self._rope = context.rope
        self._device = context.facts.device
        self._model = context.model
        self._version = context.version
        self._can_be_captured = can_be_captured(self._model)
        self._plans: list[PlanKey] | None = None  # requested by the layers; None: not found yet
        self._modules = self._version.modules  # version of the modules that requested these plans
        self._history = GraphHistory()
        self._by_pool = WeakKeyDictionary[KVPool, Graphs]()  # graphs contain addresses of the pool
        self._why_not: str | None = None  # why nothing is captured any more, on any pool

    @classmethod
    def why_not(cls, facts: Facts, config: SLOSpecConfig) -> str | None:
        if not config.cuda_graphs:
            return "cuda_graphs=False"
        if not facts.has_static_attention:
            return "its attention depends on the lengths of sequences"
        if not facts.kv_devices <= {facts.device}:
            return "it is on several devices"
        if facts.dynamic_parts is not None:
            return facts.dynamic_parts
        return "its device has no CUDA graphs" if capturer_for(facts.device) is None else None

    def renew(self, version: ModelVersion) -> None:
        self._can_be_captured = can_be_captured(self._model)
        if self._modules != version.modules:
            self._modules = version.modules
            self._plans = None

    @property
    def is_on(self) -> bool:
        """Return whether forwards may be captured, or were not tried yet."""
        return self._why_not is None

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        if not self._can_be_captured:
            return "eager: hooks, several devices, or sparse weights"
        why_not = (graphs.why_not for graphs in list(self._by_pool.values()))
        if (why := next(filter(None, (self._why_not, *why_not)), None)) is not None:
            return f"eager: {why}"
        return self.name if self._history.counts.captures else "eager: no forward has recurred yet"

    @property
    def is_ready(self) -> bool:
        return self.is_on

    @property
    def counts(self) -> GraphCounts:
        """Numbers of captured, replayed and eager forwards so far; forwards of sizes that are never
        captured do not count.
        """
        return replace(self._history.counts)

    @property
    def num_one_off_forwards(self) -> int:
        return self._history.counts.captures + self._history.counts.eager

    @property
    def num_padding_slots(self) -> int:
        return MAX_PADDING_SLOTS if self.is_on else 0

    def num_draft_rows(self, num_requests: int) -> int | None:
        return bucket_for(num_requests, BATCHES) if self.is_on else None

    def max_idle_bytes(self, pool: KVPool) -> int:
        graphs = self._by_pool.get(pool)
        return graphs.max_idle_bytes if graphs else 0

    def measuring(self, pool: KVPool) -> AbstractContextManager[None]:
        graphs = self.on(pool)
        return nullcontext() if graphs is None else graphs.capturing_at_once()

    def on(self, pool: KVPool) -> Graphs | None:
        """Return the graphs on a K/V pool, made at the first call; None if graphs are off."""
        if (
            self.is_on
            and pool not in self._by_pool
            and (capturer := capturer_for(self._device)) is not None
        ):
            self._by_pool[pool] = Graphs(capturer, self._device, self._history)
        return self._by_pool.get(pool)

    def run(self, inputs: ForwardInputs) -> Outputs | None:
        level = inputs.level
        if self._rope.lengths(inputs.parts) is not None or not self._may_replay(inputs):
            return None
        larger = padded(inputs.parts, inputs.logit_rows, inputs.pool)
        if larger is None:
            return None
        plans = self._layer_plans()
        if not self.is_on:
            return None
        parts, padded_rows = larger
        # The rows of a draft level are padded already.
        rows = padded_rows if level is None else inputs.logit_rows
        tensors = replace(inputs, parts=parts, logit_rows=rows, is_padded=True).tensors(plans)
        graphs = self._by_pool[inputs.pool]
        compute = functools.partial(self._compute, inputs.pool)
        outputs = graphs.run(tensors, compute, self._version.storage, is_kept=level is None)
        if graphs.has_failed:  # captures on another pool would fail as well
            self._why_not = graphs.why_not
        if outputs is None or level is not None:
            return None if outputs is None else Outputs(NO_LOGITS, drafted=outputs)
        num_tokens = sum(part.num_tokens for part in inputs.parts)
        logits, features, _ = outputs
        return Outputs(
            logits[: len(inputs.logit_rows)], None if features is None else features[:num_tokens]
        )

    def _may_replay(self, inputs: ForwardInputs) -> bool:
        graphs = self.on(inputs.pool)
        if graphs is None or graphs.is_off or not self._can_be_captured:
            return False
        if torch.is_autocast_enabled(self._device.type):
            return False
        return not any(part.is_chain and len(part.mask) > MAX_DENSE for part in inputs.parts)

    def _layer_plans(self) -> list[PlanKey]:
        """Return the attention plans that the layers request; turn graphs off if a plan's size
        depends on the lengths of sequences.
        """
        if self._plans is None:
            self._plans = self._eager.find_plans()
            if not {make for make, *_ in self._plans} <= REPLAYABLE:
                self._why_not = "a layer's attention depends on sequence lengths"
                logger.info("CUDA graphs are off: %s", self._why_not)
                self._by_pool.clear()
        return self._plans

    def _compute(self, pool: KVPool, tensors: ForwardTensors) -> Any:
        """Compute a forward from tensors on the device only, so that it can be captured."""
        level = tensors.level
        batch = PlannedBatch(tensors.plans, None if level is None else level.seen)
        outputs = self._eager.compute(pool, batch, tensors)
        if level is None:
            return outputs
        with self._eager.in_force():
            return level.outputs(outputs.logits)
