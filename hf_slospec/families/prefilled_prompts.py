"""Prompts that only the model's own forward can process, each as a whole: with images or
bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from hf_slospec.families.states import RecurrentStates


class Prefilled(NamedTuple):
    """K/V, states and logits of one prompt, computed by the model's own forward."""

    layers: list[
        list[torch.Tensor]
    ]  # K, V, index keys of all tokens but the last, [num_heads, length, dim]
    length: int
    position_offset: int  # later tokens' positions minus their indices
    states: RecurrentStates | None  # after all tokens but the last
    logits: torch.Tensor | None  # [vocab], after the last token; None: that was not forwarded
    # K, V, index keys of the last token, [num_heads, 1, dim], which then is not computed again, nor
    # its logits; or None
    last: list[list[torch.Tensor]] | None = None


def sees_later_tokens(model: Any) -> bool:
    """Return whether a prompt's tokens attend to later ones, as in PaliGemma; new tokens never do."""
    return getattr(model.config.get_text_config(), "use_bidirectional_attention", None) in (
        True,
        "all",
    )


def own_cache(model: Any) -> DynamicCache:
    """Return an empty cache for one forward, which also keeps K/V outside of sliding windows."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not any(cache.is_linear):
        # The window of the last token, forwarded again, begins earlier
        cache.activate_past_recording()
    return cache


def cached_layers(cache: Any) -> list[Any]:
    """Return the layers of a transformers cache that hold K and V."""
    return [
        layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None
    ]


def cached_tensors(
    cache: Any, row: int, columns: torch.Tensor, num_cached: int
) -> Iterator[list[torch.Tensor]]:
    """Yield every layer's K, V and index keys (if it has an indexer) of one row, [num_heads,
    num_held, dim] each.

    Args:
        columns: [num_columns] int64, which of the ``num_cached`` tokens; a layer with a sliding
            window may hold only the last of them.
    """
    for layer in cached_layers(cache):
        index_keys = getattr(layer, "indexer_keys", None)
        held = [
            layer.keys[row],
            layer.values[row],
            *([] if index_keys is None else [index_keys[row][None]]),
        ]
        yield [_columns(tensor, columns, num_cached) for tensor in held]


def _columns(tensor: torch.Tensor, columns: torch.Tensor, num_cached: int) -> torch.Tensor:
    """Return columns of [num_heads, num_held, dim], which may lack the first ones or have spare
    ones.
    """
    held = tensor[:, :num_cached]
    dropped = num_cached - held.shape[1]
    return held[:, (columns[columns >= dropped] - dropped).to(tensor.device)]
