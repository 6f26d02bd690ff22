"""Prompts that only the model's own forward can process, each as a whole: with images, or seen from both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from hf_slospec.models.recurrent.states import RecurrentStates


class Prefilled(NamedTuple):
    """K/V, states and logits that the model's own forward makes of one prompt."""

    layers: list[list[torch.Tensor]]  # K, V, index keys of all tokens but the last, [num_heads, length, dim]
    length: int
    position_offset: int  # later tokens' positions minus their indices
    states: RecurrentStates | None  # after all tokens but the last
    logits: torch.Tensor | None  # [vocab], after the last token, if that was forwarded


def sees_later_tokens(model: Any) -> bool:
    """Return whether the tokens of a prompt see those behind them, as in PaliGemma; new tokens never do."""
    return getattr(model.config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")


def own_cache(model: Any) -> DynamicCache:
    """Return an empty cache for one forward of the model, which keeps what lies outside of sliding windows, too."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not any(cache.is_linear):
        cache.activate_past_recording()  # the last token, forwarded again, sees one more than those behind it
    return cache


def cached_layers(cache: Any) -> list[Any]:
    """Return the layers of a transformers cache that hold K and V."""
    return [layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None]


def cached_tensors(cache: Any, row: int, columns: torch.Tensor, num_cached: int) -> Iterator[list[torch.Tensor]]:
    """Yield K, V and an indexer's keys, if it has one, of one row of every layer, [num_heads, num_held, dim] each.

    Args:
        columns: [num_columns] int64, the wanted ones of the ``num_cached`` that were cached. Layers with a sliding
            window may hold the last ones only.
    """
    for layer in cached_layers(cache):
        index_keys = getattr(layer, "indexer_keys", None)
        held = [layer.keys[row], layer.values[row], *([] if index_keys is None else [index_keys[row][None]])]
        yield [_columns(tensor, columns, num_cached) for tensor in held]


def _columns(tensor: torch.Tensor, columns: torch.Tensor, num_cached: int) -> torch.Tensor:
    """Return columns of a cache layer [num_heads, n, dim] that may hold the last ones only (window) or spare room."""
    held = tensor[:, :num_cached]
    dropped = num_cached - held.shape[1]
    return held[:, (columns[columns >= dropped] - dropped).to(tensor.device)]
