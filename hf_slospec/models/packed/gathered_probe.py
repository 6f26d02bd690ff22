"""Probe of models whose layers keep their own attention, over keys gathered for them."""

from __future__ import annotations

from typing import Any

import torch

from hf_slospec.models.attention import AttentionLayer, MaskSource, Positions
from hf_slospec.models.batch.cached_sequence import LayerShape, Stored
from hf_slospec.models.inspection.ownership import check_mask_function
from hf_slospec.models.inspection.properties import cannot_be_packed, is_reached, layer_types


class GatheredProbe(MaskSource):
    """Cache and masks for one forward of one token with the model's own attention."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        self.positions = Positions(position_ids, position_ids[0])
        self._shapes: dict[int, LayerShape] = {}
        self._windows: set[int | None] = set()  # windows of the masks that were built
        self._counting: set[int] = set()  # layers that ask for the number of cached tokens

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:
        """Record the layer that asks; see :meth:`MaskSource.get_seq_length`."""
        if layer_idx is not None:
            self._counting.add(layer_idx)
        return super().get_seq_length(layer_idx)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes of a layer's K and V, each [1, num_kv_heads, 1, dim], and return them."""
        index_key = self._shapes[layer_idx].index_key if layer_idx in self._shapes else None
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value), index_key)
        return key, value

    def update_indexer(self, index_keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Record the shape of a layer's index keys, [1, 1, dim], and return them."""
        self._shapes[layer_idx] = self._shapes[layer_idx]._replace(index_key=Stored.like(index_keys[:, None]))
        return index_keys

    def allowed(self, mask_function: Any, window: int | None) -> torch.Tensor:
        """Record the window of a mask; see :meth:`MaskSource.allowed`."""
        check_mask_function(mask_function)
        self._windows.add(window)
        return torch.ones(1, 1, dtype=torch.bool, device=self.positions.of_tokens.device)

    def layers(self, model: Any) -> list[AttentionLayer]:
        """Return the layers by index, or raise UnsupportedModelError if they cannot attend to gathered keys."""
        indices = sorted(self._shapes)
        if not indices or indices != list(range(len(indices))):
            raise cannot_be_packed(model, f"{len(indices)} of its layers keep K and V in a cache of transformers'")
        if not self._windows:
            raise cannot_be_packed(model, "it builds masks of its own, not by transformers.masking_utils")
        config, kinds = model.config.get_text_config(), set(layer_types(model))
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        expects = kinds & {"sliding_attention", "chunked_attention"} if kinds else True
        if self._windows == {None} and expects and any(is_reached(window, model) for window in windows):
            raise cannot_be_packed(model, "it may have a sliding window, which is not in its masks")
        if mask := next((name for name, buffer in model.named_buffers() if _is_mask_by_slot(buffer)), None):
            raise cannot_be_packed(model, f"its buffer {mask} masks keys by their place, not by their position")
        window = min(filter(None, self._windows), default=None)
        return [
            AttentionLayer(self._shapes[i], window, layer_idx=i, is_own=True, counts_tokens=i in self._counting)
            for i in indices
        ]


def _is_mask_by_slot(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a square mask, as layers that index masks by slots have."""
    is_mask = buffer.dtype in (torch.bool, torch.uint8) and buffer.dim() > 1
    return is_mask and buffer.shape[-2] == buffer.shape[-1] > 1
