"""Hooks for the forward of a packed batch: they write the new tokens' K and V to the pool, and
compute the layers' attention over the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.hook import AttentionHook, PlainAttention, Positions
from hf_slospec.model.attention.sdpa import (
    isolated_attention,
    masked_attention,
    sdpa_attention,
)
from hf_slospec.model.batch import (
    AttentionLayer,
    AttentionRules,
    OverVisible,
    PackedBatch,
    Plans,
    Span,
    plan_own,
    plan_visible,
)
from hf_slospec.model.kv_cache import KVPool

# A layer and its K and V in the pool, each [num_slots, num_kv_heads, dim].
Cached = tuple[AttentionLayer, torch.Tensor, torch.Tensor]


class PackedForward(AttentionHook):
    """Hook that writes the batch's K and V to the pool, and computes attention by a backend."""

    def __init__(
        self,
        pool: KVPool,
        batch: Plans,
        backend: Backend,
        layers: Sequence[AttentionLayer],  # in the order of their K and V in the pool
        position_ids: torch.Tensor,  # [1, num_tokens] int64, as passed to the model
    ):
        self.pool = pool
        self.batch = batch
        self.backend = backend
        self._layers = {layer.layer_idx: (pool_idx, layer) for pool_idx, layer in enumerate(layers)}
        self.positions = Positions(position_ids)
        # Ids of K and V -> weak references to them and the layer that cached them; layers may share
        # K and V. Strong references would keep large tensors of long prompts alive.
        self._cached: dict[tuple[int, int], tuple[ref[Any], ref[Any], Cached]] = {}
        # Indices of layers that have cached K and V and have not attended yet.
        self._unattended = set[int]()
        # The latent-attention layer that has called update() and not yet attend().
        self._latent: AttentionLayer | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's K and V of the new tokens to their slots.

        Args:
            key: [1, num_kv_heads, num_tokens, dim].
            value: [1, num_kv_heads, num_tokens, value_dim].
            layer_idx: index of the layer in the model.

        Returns:
            The same K and V; with latent attention, K and V of all visible slots.
        """
        if layer_idx not in self._layers:
            raise UnsupportedModelError(
                f"the model had {len(self._layers)} attention layers and now has one of index {layer_idx}; call "
                "disable and enable, or make a new generator, after its layers have changed"
            )
        pool_idx, layer = self._layers[layer_idx]
        self._unattended.add(layer_idx)
        keys, values = self.pool.layers[pool_idx][:2]
        slots = self.batch.plan(plan_own, keys.device).slots
        keys.index_copy_(0, slots, key[0].transpose(0, 1))
        values.index_copy_(0, slots, value[0].transpose(0, 1))
        if layer.is_latent:  # the layer expands what is returned, so it needs all visible slots
            self._latent = layer
            visible = self.batch.plan(plan_visible, keys.device).slots
            return keys[visible].transpose(0, 1)[None], values[visible].transpose(0, 1)[None]
        self._cached[id(key), id(value)] = ref(key), ref(value), (layer, keys, values)
        return key, value

    def cached(self, key: torch.Tensor, value: torch.Tensor) -> Cached | None:
        """Return the layer that cached these K and V, with its tensors in the pool; None if no
        layer did.
        """
        entry = self._cached.get((id(key), id(value)))
        if entry is None or entry[0]() is not key or entry[1]() is not value:
            return None  # the id belonged to a tensor that was freed
        self._unattended.discard(entry[2][0].layer_idx)
        return entry[2]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Compute attention of the layer that cached these K and V. The mask argument is ignored,
        as the batch has the mask.
        """
        cached = self.cached(key, value)
        batch = self.batch
        if cached is not None:
            layer, keys, values = cached
        elif self._latent is not None:
            layer = self._latent
            batch = OverVisible(self.batch)
            keys = key[0].transpose(0, 1)
            values = value[0].transpose(0, 1)
            self._unattended.discard(layer.layer_idx)
            self._latent = None
        else:
            raise RuntimeError("an attention layer attends to keys that were not cached")
        backend = self.backend
        if rules.bias is not None and backend is not isolated_attention:
            backend = sdpa_attention  # other backends do not support a bias
        rules = rules._replace(window=layer.window, chunk=layer.chunk)
        arguments = query[0], keys, values, batch, rules
        if backend is masked_attention:
            return masked_attention(*arguments, plain)[None]
        return backend(*arguments)[None]

    def check_attended(self) -> None:
        if self._unattended:
            raise UnsupportedModelError(
                f"the layers {sorted(self._unattended)} no longer attend through transformers' attention interface; "
                "call disable and enable, or make a new generator, after they were replaced"
            )


# Staged tokens from the root to a leaf: their slots counted from the end of the committed tokens,
# [length] int64; and, for tokens of the path that this batch computes, (index in the span, number
# of staged tokens that the token attends to).
Path = tuple[torch.Tensor, list[tuple[int, int]]]


class AloneForward(PackedForward):
    """Hook with which a token's attention does not depend, bit for bit, on the other tokens of the
    batch.
    """

    batch: PackedBatch

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._paths = [_paths(span) for span in self.batch.spans]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
        plain: PlainAttention,
    ) -> torch.Tensor:
        """Compute attention for one token at a time, by the model's own implementation."""
        cached = self.cached(key, value)
        assert cached is not None, "an attention layer attends to keys that were not cached"
        layer, keys, values = cached
        attended: list[Any] = [None] * query.shape[2]
        for span, paths in zip(self.batch.spans, self._paths, strict=True):
            length = span.sequence.length
            first = span.sequence.start
            committed = torch.arange(first, first + length, device=keys.device)
            for staged, tokens in paths:
                slots = torch.cat((committed, staged + first + length))
                # In the memory layout of stock's cache, as bits may depend on it.
                path_keys, path_values = (
                    stored[slots].transpose(0, 1).contiguous()[None] for stored in (keys, values)
                )
                for index, num_staged in tokens:
                    row = span.begin + index
                    end = length + num_staged
                    seen = slice(0 if layer.window is None else max(end - layer.window, 0), end)
                    # Without a mask, as the token attends to all keys of the slice.
                    attended[row] = plain(
                        query[:, :, row : row + 1], path_keys[:, :, seen], path_values[:, :, seen]
                    )
        return torch.cat(attended, dim=1)


def _paths(span: Span) -> list[Path]:
    """Return a path to each leaf of a span's staged tokens. Each token that this forward computes
    is listed on exactly one path.
    """
    mask = span.staged_mask
    offset = span.num_staged - span.num_tokens
    visible = [row.nonzero()[:, 0] for row in mask]
    paths = []
    is_done = set[int]()
    for leaf in (mask[:, offset:].sum(0) == 1).nonzero()[:, 0].tolist():
        tokens = [
            (token - offset, place + 1)
            for place, token in enumerate(visible[leaf].tolist())
            if token >= offset
        ]
        assert all(len(visible[index]) == num_staged for index, num_staged in tokens), (
            "staged tokens do not form a tree"
        )
        paths.append((visible[leaf], [place for place in tokens if place[0] not in is_done]))
        is_done |= {index for index, _ in tokens}
    return paths
