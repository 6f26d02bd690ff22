"""Prompts that packed forwards cannot process, so that the model's own forward prefills each as a
whole: with images or bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from hf_slospec.model.batch import SequenceStates


class Prefilled(NamedTuple):
    """K/V, states and logits of one prompt, computed by the model's own forward."""

    # By layer: K, V and index keys (if the layer has an indexer) of all tokens but the last,
    # [num_heads, length, dim] each.
    layers: list[list[torch.Tensor]]
    length: int  # number of tokens in ``layers``
    position_offset: int  # positions of later tokens minus their indices
    states: SequenceStates | None  # recurrent states after all tokens but the last
    logits: torch.Tensor | None  # [vocab], after the last token; None: it was not forwarded
    # By layer: K, V and index keys of the last token, [num_heads, 1, dim] each; they and ``logits``
    # are used as they are. None: the last token is forwarded again.
    last: list[list[torch.Tensor]] | None = None


def sees_later_tokens(model: Any) -> bool:
    """Return whether prompt tokens attend to later prompt tokens, as in PaliGemma; new tokens never
    do.
    """
    return getattr(model.config.get_text_config(), "use_bidirectional_attention", None) in (
        True,
        "all",
    )


def own_cache(model: Any) -> DynamicCache:
    """Return an empty transformers cache for one sequence, which also keeps K/V outside of sliding
    windows.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not any(cache.is_linear):
        # The last token is forwarded again, and its window begins before the one that is kept.
        cache.activate_past_recording()
    return cache


def cached_layers(cache: Any) -> list[Any]:
    """Return the layers of a transformers cache that hold K and V; layers with recurrent states are
    left out.
    """
    return [
        layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None
    ]


def cached_tensors(
    cache: Any, row: int, columns: torch.Tensor, num_cached: int
) -> Iterator[list[torch.Tensor]]:
    """Yield each layer's K, V and index keys (if it has an indexer) of some tokens of one row,
    [num_heads, num_held, dim] each.

    Args:
        cache: a transformers cache.
        row: index in the batch.
        columns: [num_columns] int64, indices of the tokens. A layer with a sliding window may hold
            only the last of them, so that num_held is smaller than num_columns.
        num_cached: number of tokens that the cache has seen.
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
    """Return the columns of [num_heads, num_held, dim] for these tokens. The tensor may lack the
    first tokens, or have spare columns at its end.
    """
    held = tensor[:, :num_cached]
    dropped = num_cached - held.shape[1]
    return held[:, (columns[columns >= dropped] - dropped).to(tensor.device)]
