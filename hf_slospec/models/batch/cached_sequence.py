"""A sequence's slots in the K/V pool, and the shapes of the tensors that layers store there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_slospec.models.recurrent.states import RecurrentStates

Encoded = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer: K and V of one row's encoder, [heads, length, dim]


class Stored(NamedTuple):
    """Shape of one token's K or V in one layer; the two may differ (multi-head latent attention, autocast)."""

    num_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * self.dim * self.dtype.itemsize

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Stored:
        """Return the shape of one token's K or V, from a layer's tensor [batch, num_heads, num_tokens, dim]."""
        return cls(tensor.shape[1], tensor.shape[-1], tensor.dtype, tensor.device)


class LayerShape(NamedTuple):
    """Shapes of the tensors that one attention layer stores per token."""

    key: Stored
    value: Stored
    index_key: Stored | None = None  # key of an indexer, which chooses the keys that the layer attends to

    @property
    def stored(self) -> list[Stored]:
        """Shapes of all stored tensors."""
        return [shape for shape in self if shape is not None]


@dataclass(eq=False)
class CachedSequence:
    """A sequence's range of slots: committed tokens, then room for the tokens that a step stages.

    Only ``length`` tells which tokens are committed, so dropping a rejected token's K/V touches no memory. ``start``
    and ``capacity`` change when room is made for others or the pool is enlarged.
    """

    start: int = 0
    capacity: int = 0
    length: int = 0  # committed tokens
    staged_end: int = 0  # slots up to the last staged token; 0: what was staged has been committed
    position_offset: int = 0  # new tokens' positions minus their indices: tokens of an image may share positions
    prompt_len: int = 0  # tokens that stock decoding forwards together; length-dependent RoPE is chosen by it
    num_padding: int = 0  # tokens by which the longest prompt of its batch exceeds its prompt
    states: RecurrentStates | None = None  # states of layers that keep no K and V; None if the model has no such layer
    encoded: Encoded | None = None  # what cross-attention attends to; None without an encoder

    @property
    def num_written(self) -> int:
        """Return the number of slots whose K/V moves with the sequence: other calls may run while tokens are staged."""
        return min(max(self.length, self.staged_end), self.capacity)

    def truncate(self, length: int) -> None:
        """Keep at most ``length`` tokens, or none if a recurrent state already contains later ones."""
        if length < self.length and self.states is not None and length < self.states.length:
            self.states, length = None, 0
        self.length = min(self.length, length)

    def commit(self, nodes: Sequence[int]) -> None:
        """Commit staged nodes that form a path, after their K/V was moved to the end of the committed tokens."""
        self.length += len(nodes)
        self.staged_end = 0
        if self.states is not None:
            self.states.kept = nodes
