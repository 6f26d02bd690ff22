"""Cache object that a model receives in the forward of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.attention.backends import Backend
from hf_slospec.models.attention.dense import isolated_attention
from hf_slospec.models.attention.positions import Positions
from hf_slospec.models.attention.sdpa import sdpa_attention
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.batch.packed_batch import AttentionLayer, OverVisible, Plans, Span, plan_own, plan_visible
from hf_slospec.models.kv_cache.pool import KVPool
from hf_slospec.models.recurrent.forward import RecurrentForward


class PackedForward(RecurrentForward):
    """One forward of a packed batch: the model's cache, and the attention of its layers."""

    def __init__(
        self,
        pool: KVPool,
        batch: Plans,
        backend: Backend,
        layers: Sequence[AttentionLayer],  # in the order in which the pool stores them
        position_ids: torch.Tensor,  # [1, num_tokens] int64, as passed to the model
        spans: Sequence[Span] = (),  # sequences whose states layers read and stage; none if no layer keeps a state
    ):
        super().__init__(spans)
        self.pool, self.batch, self.backend = pool, batch, backend
        self._layers = {layer.layer_idx: (pool_idx, layer) for pool_idx, layer in enumerate(layers)}
        self._positions = Positions(position_ids)
        # (id(K), id(V)) -> both and layer_idx; layers may share K and V. They are not kept alive: prompts are long.
        self._cached: dict[tuple[int, int], tuple[ref[torch.Tensor], ref[torch.Tensor], int]] = {}
        self._unattended = set[int]()  # layers that have cached K and V and not attended yet
        self._latent: int | None = None  # layer_idx of a latent layer between update and attend

    # transformers reads it to build masks, which packed forwards do not use.
    is_initialized = True

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Return 0; to a layer that asks for its own length, as Llama 4's do, :attr:`Positions.offsets`."""
        return 0 if layer_idx is None else self._positions.offsets

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage a layer's K and V of the batch, each [1, num_kv_heads, num_tokens, dim]."""
        if layer_idx not in self._layers:
            raise UnsupportedModelError(
                f"the model had {len(self._layers)} attention layers and now has one of index {layer_idx}; call "
                "disable and enable, or make a new generator, after its layers have changed"
            )
        pool_idx, layer = self._layers[layer_idx]
        self._unattended.add(layer_idx)
        keys, values = self.pool.keys[pool_idx], self.pool.values[pool_idx]
        slots = self.batch.plan(plan_own, keys.device).slots
        keys.index_copy_(0, slots, key[0].transpose(0, 1))
        values.index_copy_(0, slots, value[0].transpose(0, 1))
        if layer.is_latent:  # the layer expands the returned tensors, so it needs all visible slots
            self._latent = layer_idx
            visible = self.batch.plan(plan_visible, keys.device).slots
            return keys[visible].transpose(0, 1)[None], values[visible].transpose(0, 1)[None]
        self._cached[id(key), id(value)] = ref(key), ref(value), layer_idx
        return key, value

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Return the index of the layer that cached these K and V; None if none did."""
        cached = self._cached.get((id(key), id(value)))
        if cached is None or cached[0]() is not key or cached[1]() is not value:  # ids are used again
            return None
        return cached[2]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of the layer that cached these K and V; ``mask`` is not read, as the batch has it.

        Returns:
            [1, num_tokens, num_heads, value_dim].
        """
        layer_idx, batch = self.layer_of(key, value), self.batch
        if layer_idx is not None:
            pool_idx, _ = self._layers[layer_idx]
            keys, values = self.pool.keys[pool_idx], self.pool.values[pool_idx]
        elif self._latent is not None:
            layer_idx, self._latent, batch = self._latent, None, OverVisible(self.batch)
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        else:
            raise RuntimeError("an attention layer attends to keys that were not cached")
        self._unattended.discard(layer_idx)
        _, layer = self._layers[layer_idx]
        backend = self.backend
        if rules.bias is not None and backend is not isolated_attention:
            backend = sdpa_attention  # the others take no bias
        return backend(query[0], keys, values, batch, rules._replace(window=layer.window, chunk=layer.chunk))[None]

    def check_attended(self) -> None:
        """Raise UnsupportedModelError if a layer has cached K and V, but attended to its own tokens only."""
        if self._unattended:
            raise UnsupportedModelError(
                f"the layers {sorted(self._unattended)} no longer attend through transformers' attention interface; "
                "call disable and enable, or make a new generator, after they were replaced"
            )
