"""Captured forwards of one model: which forwards a CUDA graph can replay, and the graphs of each K/V pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hf_slospec.models.attention import MAX_DENSE, NewTokens, pack, plan_tree
from hf_slospec.models.batch.packed_batch import plan_own
from hf_slospec.models.device.graphs import GraphCounts, GraphHistory, Graphs, capturer_for
from hf_slospec.models.inspection.graph_preconditions import GraphPreconditions
from hf_slospec.models.kv_cache.pool import KVPool
from hf_slospec.models.packed.inputs import Inputs
from hf_slospec.models.packed.padding import padded

logger = logging.getLogger(__name__)

REPLAYABLE = {pack, plan_tree, plan_own}  # plans of padded batches whose sizes do not depend on lengths of texts


class CapturedForwards:
    """CUDA graphs of a model's packed forwards, and the conditions under which a forward is replayed."""

    def __init__(self, model: Any, device: torch.device, is_on: bool):
        """``is_on``: capture forwards, if the model's device can."""
        self._device = device
        self.is_on = is_on and capturer_for(device) is not None
        self._preconditions = GraphPreconditions(model) if self.is_on else None
        self._now: Hashable = None  # the preconditions when they were read last
        self._history = GraphHistory()
        self.by_pool = WeakKeyDictionary[KVPool, Graphs]()  # by the pool whose memory they use

    def renew(self) -> None:
        """Take in changes of the model's modules."""
        if self._preconditions is not None:
            self._preconditions.renew()
            self.read_preconditions()

    def read_preconditions(self) -> None:
        """Read what the next forwards depend on beside their inputs, until this is called again."""
        if self.is_on and self._preconditions is not None and self._preconditions.is_plain:
            self._now = self._preconditions.now()

    @property
    def counts(self) -> GraphCounts:
        """Numbers of captured, replayed and eager forwards so far, among those of sizes that can be captured."""
        return replace(self._history.counts)

    def on(self, pool: KVPool) -> Graphs | None:
        """Return the captured forwards on a pool; None if this model captures none."""
        if self.is_on and pool not in self.by_pool and (capturer := capturer_for(self._device)) is not None:
            self.by_pool[pool] = Graphs(capturer, self._device, self._history)
        return self.by_pool.get(pool)

    def padded(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> tuple[list[NewTokens], torch.Tensor] | None:
        """Return parts and logit rows padded to one of few sizes; None if the forward cannot be replayed anyway."""
        graphs, preconditions = self.on(pool), self._preconditions
        if graphs is None or graphs.is_off or preconditions is None or not preconditions.is_plain:
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
        outputs = graphs.run(inputs, compute, self._now, is_kept=inputs.level is None)
        self.is_on &= not graphs.has_failed  # captures on another pool would fail as well
        return outputs
