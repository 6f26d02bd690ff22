"""Captured forwards of one model: which forwards a CUDA graph can replay, and the graphs of each
K/V pool.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from hf_slospec.cuda.flash import MAX_DENSE, pack
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
from hf_slospec.model.batch import CachedSequence, NewTokens, plan_own
from hf_slospec.model.inputs import Inputs
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.version import can_be_traced

MAX_PADDING_SLOTS = (
    144  # tokens: the largest step between two sizes, and one for each of 16 padding sequences
)
MAX_KEPT = 256  # padding sequences that are kept for later batches
SHORT = 16  # tokens; shorter padding sequences do not make attention faster


def padded(
    parts: Sequence[NewTokens], logit_rows: torch.Tensor, pool: KVPool
) -> tuple[list[NewTokens], torch.Tensor] | None:
    """Return the parts with padding sequences behind them, and the logit rows padded with row 0.

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
    """Return the numbers of padding sequences and of their tokens."""
    num_padding = bucket_for(num_parts, BATCHES) - num_parts
    missing = bucket_for(num_tokens + num_padding) - num_tokens
    # Attention pads all sequences to the longest one, so that should not be a padding sequence.
    needed = -(-missing // max(bucket_for(longest), SHORT))
    if needed == 1 > num_padding:
        num_padding = 1  # one more sequence than BATCHES asks for, not a whole bucket more
    elif needed > num_padding:
        num_padding = bucket_for(num_parts + needed, BATCHES) - num_parts
    return num_padding, bucket_for(num_tokens + num_padding) - num_tokens


def _padding_sequence(start: int, length: int, like: NewTokens) -> NewTokens:
    """Return a padding sequence on the device of ``like``, with embeddings if that has some."""
    made = _kept_padding(start, length, like.mask.dtype, like.mask.device)
    if like.embeds is None:
        return made
    return replace(made, embeds=like.embeds.new_zeros(length, like.embeds.shape[-1]))


@functools.lru_cache(maxsize=MAX_KEPT)
def _kept_padding(start: int, length: int, dtype: torch.dtype, device: torch.device) -> NewTokens:
    """Return a padding sequence, which is only to be read."""
    zeros = torch.zeros(length, dtype=torch.int64, device=device)
    return NewTokens(
        CachedSequence(start, length), zeros, zeros, torch.eye(length, dtype=dtype, device=device)
    )


logger = logging.getLogger(__name__)

REPLAYABLE = {
    pack,
    plan_tree,
    plan_own,
}  # plans of padded batches whose sizes do not depend on lengths of texts


class CapturedForwards:
    """CUDA graphs of a model's packed forwards, and the conditions under which a forward is
    replayed.
    """

    def __init__(self, model: Any, device: torch.device, storage: int, is_on: bool):
        """Capture nothing yet.

        Args:
            model: the model.
            device: that of its input.
            storage: version of the model's storage; set again before forwards.
            is_on: capture forwards, if the device can.
        """
        self._model = model
        self._device = device
        self.storage = storage
        self.is_on = is_on and capturer_for(device) is not None
        self._can_be_traced = self.is_on and can_be_traced(model)
        self._history = GraphHistory()
        self.by_pool = WeakKeyDictionary[KVPool, Graphs]()  # by the pool whose memory they use

    def renew(self) -> None:
        """Take in changes of the model's modules."""
        self._can_be_traced = self.is_on and can_be_traced(self._model)

    @property
    def counts(self) -> GraphCounts:
        """Numbers of captured, replayed and eager forwards so far, among those of sizes that can be
        captured.
        """
        return replace(self._history.counts)

    def on(self, pool: KVPool) -> Graphs | None:
        """Return the captured forwards on a pool; None if this model captures none."""
        if (
            self.is_on
            and pool not in self.by_pool
            and (capturer := capturer_for(self._device)) is not None
        ):
            self.by_pool[pool] = Graphs(capturer, self._device, self._history)
        return self.by_pool.get(pool)

    def padded(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> tuple[list[NewTokens], torch.Tensor] | None:
        """Return parts and logit rows padded to one of few sizes; None if the forward cannot be
        replayed anyway.
        """
        graphs = self.on(pool)
        if graphs is None or graphs.is_off or not self._can_be_traced:
            return None
        if torch.is_autocast_enabled(self._device.type):
            return None
        if any(part.is_chain and len(part.mask) > MAX_DENSE for part in parts):
            return None
        return padded(parts, logit_rows, pool)

    def run(self, pool: KVPool, inputs: Inputs, compute: Callable[[Inputs], Any]) -> Any | None:
        """Return the outputs of a captured forward of padded parts; None if none fits the inputs.

        ``compute`` gets the inputs on the device, and returns a tree of tensors.
        """
        if not inputs.plans:  # no forward has shown yet which plans the layers need
            return None
        if not {make for make, *_ in inputs.plans} <= REPLAYABLE:
            logger.info("CUDA graphs are off: a layer's attention depends on sequence lengths")
            self.is_on = False
            self.by_pool.clear()
            return None
        graphs = self.by_pool[pool]
        outputs = graphs.run(inputs, compute, self.storage, is_kept=inputs.level is None)
        self.is_on &= not graphs.has_failed  # captures on another pool would fail as well
        return outputs
