"""The sequences of a packed row, and which keys each of their tokens sees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_slospec.models.kv_pool import CachedSequence, LayerShape


class AttentionLayer(NamedTuple):
    """What is known of a layer that caches K and V."""

    shape: LayerShape
    window: int | None = None  # sliding: a token attends to itself and window - 1 positions before it
    is_latent: bool = False  # what it caches is expanded into K and V after caching (multi-head latent attention)


@dataclass(eq=False)
class Span:
    """The part of a packed row that belongs to one sequence."""

    sequence: CachedSequence
    begin: int  # its tokens are row[begin:end]
    end: int
    fresh_mask: torch.Tensor  # [end - begin, num_fresh] bool; fresh: staged earlier in this step, then own
    fresh_positions: torch.Tensor  # [num_fresh] int64
    is_chain: bool = False  # its tokens are all that is fresh, each at the position after, and seeing, the one before
    _masks: dict[tuple[int | None, int, torch.dtype, torch.device], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def num_fresh(self) -> int:
        return len(self.fresh_positions)

    @property
    def num_visible(self) -> int:
        return self.sequence.length + self.num_fresh

    @property
    def visible(self) -> slice:
        """The slots this forward may attend to: committed tokens, then all fresh ones, its own last."""
        return slice(self.sequence.start, self.sequence.start + self.num_visible)

    def mask(self, window: int | None, like: torch.Tensor, repeats: int = 1) -> torch.Tensor | None:
        """Additive mask over the visible slots, or None if everything is visible.

        A sliding window counts positions, not slots: a node's position is its root's plus its depth.

        Returns:
            [repeats * num_tokens, num_visible], the mask ``repeats`` times, of ``like``'s dtype and device; built
            once per forward.
        """
        key = window, repeats, like.dtype, like.device
        if key not in self._masks:
            mask = self._build(window, like.dtype)
            self._masks[key] = mask if mask is None else mask.repeat(repeats, 1).to(like.device)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        num_tokens, length = self.num_tokens, self.sequence.length
        device = self.fresh_mask.device
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, self.fresh_mask), dim=1)
        if window is not None:
            key_positions = torch.cat((torch.arange(length, device=device), self.fresh_positions))
            query_positions = self.fresh_positions[-num_tokens:]
            allowed = allowed & (query_positions[:, None] - key_positions[None, :] < window)
        if num_tokens == 1 and bool(allowed.all()):
            return None
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


@dataclass(eq=False)
class Row:
    """A packed row as one kind of layer sees it."""

    spans: list[Span]
    visible: list[slice]  # per span: where the slots that it sees are in the layer's K and V
    _plans: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, make: Callable[..., Any], *arguments: Hashable) -> Any:
        """What ``make(row, *arguments)`` returns: made by the first layer that asks, the same for all others."""
        if (key := (make, *arguments)) not in self._plans:
            self._plans[key] = make(self, *arguments)
        return self._plans[key]


class Slots:
    """Slots of several ranges in a row, on whichever devices ask for them."""

    def __init__(self, ranges: Sequence[slice]):
        self._ranges = ranges
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """-> [num_slots] int64"""
        if device not in self._on:
            self._on[device] = torch.cat([torch.arange(r.start, r.stop) for r in self._ranges]).to(device)
        return self._on[device]
