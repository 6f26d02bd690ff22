"""Attention of every token alone: the call that stock decoding makes for it, over exactly its keys in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_slospec.models.attention.forward import PackedForward
from hf_slospec.models.batch.packed_batch import PackedBatch, Span

# Attention of one token, as stock computes it: (query, key, value), each [1, heads, tokens, dim] -> [1, 1, heads, dim]
PlainAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Path(NamedTuple):
    """Staged tokens from the first one to a leaf, and tokens of the batch that see the first ones of them."""

    slots: torch.Tensor  # [length] int64, behind the committed tokens
    tokens: list[tuple[int, int]]  # (index in the span, number of staged tokens that it sees, itself the last)


class AloneForward(PackedForward):
    """Forward of a packed batch in which a token's attention does not depend on the other tokens, bit for bit."""

    batch: PackedBatch

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._paths = [_paths(span) for span in self.batch.spans]

    def attend_alone(
        self, plain: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return attention of the layer that cached these K and V.  -> [1, num_tokens, num_heads, value_dim]"""
        layer_idx = self.layer_of(key, value)
        assert layer_idx is not None, "an attention layer attends to keys that were not cached"
        self._unattended.discard(layer_idx)
        pool_idx, layer = self._layers[layer_idx]
        keys, values = self.pool.keys[pool_idx], self.pool.values[pool_idx]
        attended: list[Any] = [None] * query.shape[2]
        for span, paths in zip(self.batch.spans, self._paths, strict=True):
            length, longest = span.sequence.length, max(len(path.slots) for path in paths)
            committed = slice(span.sequence.start, span.sequence.start + length)
            path_keys, path_values = (
                stored.new_empty(1, stored.shape[1], length + longest, stored.shape[2]) for stored in (keys, values)
            )
            path_keys[0, :, :length] = keys[committed].transpose(0, 1)
            path_values[0, :, :length] = values[committed].transpose(0, 1)
            for path in paths:
                slots, end = path.slots + committed.stop, length + len(path.slots)
                path_keys[0, :, length:end] = keys[slots].transpose(0, 1)
                path_values[0, :, length:end] = values[slots].transpose(0, 1)
                for index, num_staged in path.tokens:
                    row, end = span.begin + index, length + num_staged
                    seen = slice(0 if layer.window is None else max(end - layer.window, 0), end)
                    own = query[:, :, row : row + 1], path_keys[:, :, seen], path_values[:, :, seen]
                    attended[row] = plain(*own)
        return torch.cat(attended, dim=1)


def _paths(span: Span) -> list[Path]:
    """Return paths of a span's staged tokens that together have all of its tokens, each token on one of them."""
    mask, offset = span.staged_mask, span.num_staged - span.num_tokens
    seen = [row.nonzero()[:, 0] for row in mask]
    paths, is_done = [], set[int]()
    for leaf in (mask[:, offset:].sum(0) == 1).nonzero()[:, 0].tolist():
        places = [(token - offset, place + 1) for place, token in enumerate(seen[leaf].tolist()) if token >= offset]
        assert all(len(seen[index]) == num_staged for index, num_staged in places), "staged tokens do not form a tree"
        paths.append(Path(seen[leaf], [(index, length) for index, length in places if index not in is_done]))
        is_done |= {index for index, _ in places}
    return paths
