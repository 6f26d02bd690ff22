"""The sequences of a packed row, and which keys each of their tokens sees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.kv_cache.pool import CachedSequence, LayerShape


class AttentionLayer(NamedTuple):
    """What is known of a layer that caches K and V."""

    shape: LayerShape
    window: int | None = None  # sliding: a token attends to itself and window - 1 positions before it
    is_latent: bool = False  # what it caches is expanded into K and V after caching (multi-head latent attention)


@dataclass(eq=False)
class NewTokens:
    """Tokens of one sequence that a forward adds behind those already in the KV pool; on the host or on the device."""

    sequence: CachedSequence
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_staged] int64; fresh: staged by earlier forwards of this step, then these tokens
    mask: torch.Tensor  # [num_tokens, num_staged] bool, True = may attend
    embeds: torch.Tensor | None = None  # [num_tokens, hidden], in place of those of input_ids
    is_chain: bool = False  # nothing else is fresh, and each token sees those before it


@dataclass(eq=False)
class Span:
    """The part of a packed row that belongs to one sequence."""

    sequence: CachedSequence
    begin: int  # its tokens are row[begin:end]
    end: int
    staged_mask: torch.Tensor  # [end - begin, num_staged] bool; fresh: staged earlier in this step, then own
    staged_positions: torch.Tensor  # [num_staged] int64
    is_chain: bool = False  # its tokens are all that is fresh, each at the position after, and seeing, the one before
    _masks: dict[tuple[int | None, int, torch.dtype, torch.device], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def num_staged(self) -> int:
        return len(self.staged_positions)

    @property
    def num_visible(self) -> int:
        return self.sequence.length + self.num_staged

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
            mask = self._build(window, like.dtype, like.device)
            self._masks[key] = mask if mask is None else mask.repeat(repeats, 1)
        return self._masks[key]

    def _build(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        num_tokens, length = self.num_tokens, self.sequence.length
        staged_mask, staged_positions = to_device((self.staged_mask, self.staged_positions), device)
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, staged_mask), dim=1)
        if window is not None:
            key_positions = torch.cat((torch.arange(length, device=device), staged_positions))
            query_positions = staged_positions[-num_tokens:]
            allowed = allowed & (query_positions[:, None] - key_positions[None, :] < window)
        if num_tokens == 1 and device.type == "cpu" and bool(allowed.all()):  # elsewhere, looking would mean to wait
            return None
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


@dataclass(eq=False)
class PackedBatch:
    """A packed row as one kind of layer sees it."""

    spans: list[Span]
    visible: list[slice]  # per span: where the slots that it sees are in the layer's K and V
    is_padded: bool = False  # plans come in few sizes, too
    plans: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[NewTokens], is_padded: bool = False) -> PackedBatch:
        spans, begin = [], 0
        for part in parts:
            assert part.sequence.length + len(part.positions) <= part.sequence.capacity
            end = begin + len(part.input_ids)
            spans.append(Span(part.sequence, begin, end, part.mask, part.positions, part.is_chain))
            begin = end
        return cls(spans, [span.visible for span in spans], is_padded)

    @property
    def own_slots(self) -> torch.Tensor:
        """Where the row's K and V go.  [num_tokens] int64"""
        pairs = zip(self.spans, self.visible, strict=True)
        return torch.cat([torch.arange(slots.stop - span.num_tokens, slots.stop) for span, slots in pairs])

    def plan(self, make: Callable[..., Any], device: torch.device, *arguments: Hashable) -> Any:
        """What ``make(row, *arguments)`` returns, on a device: made by the first layer that asks, the same for all."""
        if (key := (make, device, *arguments)) not in self.plans:
            self.plans[key] = to_device(make(self, *arguments), device).with_bias()
        return self.plans[key]


class PlannedBatch:
    """A row of which nothing is known but plans that were made before."""

    def __init__(self, plans: dict[Hashable, Any]):
        self._plans = {key: plan.with_bias() for key, plan in plans.items()}

    def plan(self, *key: Hashable) -> Any:
        return self._plans[key]

    @property
    def spans(self) -> list[Span]:
        raise RuntimeError("a layer's calls depend on the lengths of texts; only flash attention's do not")


class Slots:
    """Slots in a row, on whichever devices ask for them."""

    def __init__(self, slots: torch.Tensor):
        self._on = {slots.device: slots}
        self._first = slots

    def on(self, device: torch.device) -> torch.Tensor:
        """-> [num_slots] int64"""
        if device not in self._on:
            self._on[device] = to_device(self._first, device)
        return self._on[device]
