"""What a model is given in place of a cache while it forwards a packed row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hf_slospec.models.attention.backends import Backend
from hf_slospec.models.attention.packed_batch import AttentionLayer, PackedBatch, PlannedBatch, Slots
from hf_slospec.models.kv_cache.pool import KVPool


class PackedForward:
    """One forward over a packed row: the cache its model is given, and what its attention layers attend with."""

    def __init__(
        self,
        pool: KVPool,
        row: PackedBatch | PlannedBatch,
        own_slots: torch.Tensor,
        backend: Backend,
        layers: Sequence[AttentionLayer],
    ):
        """``own_slots`` [num_tokens] int64: where the row's K and V go."""
        self.pool, self.row, self.backend, self.layers = pool, row, backend, layers
        self._own_slots = Slots(own_slots)
        self._layer_of: dict[tuple[int, int], int] = {}  # ids of a layer's fresh K and V -> it; others may share them
        self._fresh: list[torch.Tensor] = []  # keeps those ids from being given to other tensors
        self._latent: int | None = None  # the latent layer that cached last and has not attended yet

    @functools.cached_property
    def _gathered(self) -> PackedBatch:
        """The row as layers see it that were given what is visible, one sequence after the other."""
        ends = itertools.accumulate(span.num_visible for span in self.row.spans)
        return PackedBatch(
            self.row.spans,
            [slice(end - span.num_visible, end) for span, end in zip(self.row.spans, ends, strict=False)],
        )

    @functools.cached_property
    def _visible_slots(self) -> Slots:
        return Slots(torch.cat([torch.arange(slots.start, slots.stop) for slots in self.row.visible]))

    # What a forward asks of a transformers cache; sequence lengths matter to mask building only, which is bypassed.
    is_initialized = True

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's fresh K/V, each [1, num_kv_heads, num_tokens, dim]."""
        keys, values = self.pool.keys[layer_idx], self.pool.values[layer_idx]
        own = self._own_slots.on(keys.device)
        keys.index_copy_(0, own, key[0].transpose(0, 1))
        values.index_copy_(0, own, value[0].transpose(0, 1))
        if self.layers[layer_idx].is_latent:  # the layer expands what it gets back: it needs all that is visible
            self._latent = layer_idx
            visible = self._visible_slots.on(keys.device)
            return keys[visible].transpose(0, 1)[None], values[visible].transpose(0, 1)[None]
        self._layer_of[id(key), id(value)] = layer_idx
        self._fresh += key, value
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        mask: torch.Tensor | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a layer: K and V say which. Mask and window are known here.  -> [1, num_tokens, heads, dim]"""
        layer, row = self._layer_of.get((id(key), id(value))), self.row
        if layer is not None:
            keys, values = self.pool.keys[layer], self.pool.values[layer]
        elif self._latent is not None:
            layer, self._latent, row = self._latent, None, self._gathered
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        else:
            raise RuntimeError("an attention layer attends to keys that it did not cache")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = self.layers[layer].window
        return self.backend(query[0], keys, values, row, scaling, window, softcap, sinks)[None]
