"""Attention of every token alone: the call that stock decoding makes for it, over exactly its keys in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_slospec.models.attention.forward import PackedForward
from hf_slospec.models.batch.packed_batch import PackedBatch, Span

# Attention of one token, as stock computes it: (query, key, value), each [1, heads, tokens, dim] -> [1, 1, heads, dim]
PlainAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
        pool_idx, layer = self._layers[self._layer_of[id(key), id(value)]]
        keys, values = self.pool.keys[pool_idx], self.pool.values[pool_idx]
        attended = []
        for span, paths in zip(self.batch.spans, self._paths, strict=True):
            length, longest = span.sequence.length, max(map(len, paths))
            committed = slice(span.sequence.start, span.sequence.start + length)
            path_keys, path_values = (
                stored.new_empty(1, stored.shape[1], length + longest, stored.shape[2]) for stored in (keys, values)
            )
            path_keys[0, :, :length] = keys[committed].transpose(0, 1)
            path_values[0, :, :length] = values[committed].transpose(0, 1)
            for index, path in enumerate(paths):
                end = length + len(path)
                slots = path + committed.stop
                path_keys[0, :, length:end] = keys[slots].transpose(0, 1)
                path_values[0, :, length:end] = values[slots].transpose(0, 1)
                seen = slice(0 if layer.window is None else max(end - layer.window, 0), end)
                row = span.begin + index
                attended.append(plain(query[:, :, row : row + 1], path_keys[:, :, seen], path_values[:, :, seen]))
        return torch.cat(attended, dim=1)


def _paths(span: Span) -> list[torch.Tensor]:
    """Return the indices of the staged tokens that each of a span's tokens sees, itself the last.  -> int64 each"""
    rows, columns = span.staged_mask.nonzero(as_tuple=True)
    return list(columns.split(rows.bincount(minlength=span.num_tokens).tolist()))
