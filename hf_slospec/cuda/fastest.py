"""Attention of ``attention="auto"`` where several kernels can be used: by a trial, the fastest for
each shape of layers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from math import inf

import torch

from hf_slospec.cuda.graphs import capturer_for, replayed_s
from hf_slospec.model.attention.backends import KernelAttention
from hf_slospec.model.batch import AttentionRules, CachedSequence, PackedBatch, Plans, Span
from hf_slospec.model.tree_mask import causal_mask

logger = logging.getLogger(__name__)

# The trial's step: requests, committed tokens of each, and nodes of each tree, which has two branches
REQUESTS = 8
KEYS = 512
NODES = 16


class FastestAttention(KernelAttention):
    """Backend that computes layers of one shape by the fastest of several backends.

    The choice is made in the first call for a shape, by a step of trees in replayed CUDA graphs. It
    does not depend on the batch, as a captured forward has the plans of the backends that its
    layers were seen to call.
    """

    def __init__(self, backends: Sequence[KernelAttention]):
        """Make the backend; the first of ``backends`` is used where no trial can be made."""
        super().__init__()
        self._backends = backends
        self._chosen: dict[Hashable, KernelAttention] = {}
        self.__name__ = f"fastest_attention[{'; '.join(each.__name__ for each in backends)}]"

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor | str:
        has_sinks = rules.sinks is not None
        others = rules.window, rules.softcap is not None, has_sinks, rules.chunk is not None
        shape = query.device, query.dtype, query.shape[0], keys.shape[1:], values.shape[2], others
        if (chosen := self._chosen.get(shape)) is None:
            seconds = [seconds_of(each, query, keys, values, rules) for each in self._backends]
            chosen = self._chosen[shape] = self._backends[seconds.index(min(seconds))]
            names = (each.__name__ for each in self._backends)
            times = ", ".join(
                f"{name} {1e6 * each:.1f} us" for name, each in zip(names, seconds, strict=True)
            )
            logger.debug("%s for layers of shape %s: %s", chosen.__name__, shape, times)
        return chosen.attend(query, keys, values, batch, rules)


def seconds_of(
    backend: KernelAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rules: AttentionRules,
) -> float:
    """Return the seconds of a step of trees in a replayed graph, for tensors of these heads and
    dtypes; infinity if the backend cannot compute it.
    """
    step = _step()
    num_slots = REQUESTS * (KEYS + NODES)
    tensors = (
        query.new_zeros(query.shape[0], REQUESTS * NODES, query.shape[2]),
        keys.new_zeros(num_slots, *keys.shape[1:]),
        values.new_zeros(num_slots, *values.shape[1:]),
    )
    run = functools.partial(backend.attend, *tensors, step, rules)
    try:
        capturer = capturer_for(query.device)
        if capturer is None or isinstance(run(), str):
            return inf
        return replayed_s(capturer, run, query.device)
    except RuntimeError as error:  # no memory, or a kernel that cannot be captured
        logger.debug("%s was not timed: %r", backend.__name__, error)
        return inf


def _step() -> PackedBatch:
    mask = causal_mask(NODES).clone()
    branch = torch.arange(NODES, device="cpu") % 2
    mask[1:, 1:] &= branch[1:, None] == branch[None, 1:]
    positions = KEYS + (torch.arange(NODES, device="cpu") + 1) // 2
    spans = [
        Span(
            CachedSequence(index * (KEYS + NODES), KEYS + NODES, KEYS),
            index * NODES, (index + 1) * NODES, mask, positions,
        )
        for index in range(REQUESTS)
    ]  # fmt: skip
    return PackedBatch(spans, [span.visible for span in spans])
