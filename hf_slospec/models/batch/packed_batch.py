"""Packed batches: the sequences of one forward and the keys visible to each of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.batch.cached_sequence import CachedSequence, LayerShape
from hf_slospec.models.device.transfer import to_device

NO_LENGTHS = "a layer's attention depends on sequence lengths (flash attention's does not), so it cannot be captured"
FIRST_SEEN = 2  # first index in a table of mask values whose value varies: 0 is False, and 1 is True


class AttentionLayer(NamedTuple):
    """Cache layout and mask properties of an attention layer."""

    shape: LayerShape
    window: int | None = None  # sliding window: a token attends to itself and the window - 1 positions before it
    is_latent: bool = False  # multi-head latent attention: the layer expands the cached tensors into K and V
    chunk: int | None = None  # chunked attention: positions per chunk; no token attends beyond its own chunk
    layer_idx: int = 0  # index in the model, where layers that keep a state instead are counted too
    is_own: bool = False  # the layer's own code computes attention, over keys gathered for it
    counts_tokens: bool = False  # the layer asks the cache for its length; in stock calls, this counts padding too


@dataclass(eq=False)
class NewTokens:
    """Tokens of one sequence that a forward appends to those in the K/V pool; tensors are on the host or the device."""

    sequence: CachedSequence
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_staged] int64: tokens staged by earlier forwards of the step, then these
    # [num_tokens, num_staged] bool, True = may attend; or int64 on the host: indices into a table of booleans on the
    # device, which starts with False and True.
    mask: torch.Tensor
    embeds: torch.Tensor | None = None  # [num_tokens, hidden], replaces the embeddings of input_ids
    is_chain: bool = False  # nothing else is staged, and the mask is causal
    windowed_mask: torch.Tensor | None = None  # same shape; mask in layers with a sliding window; None: ``mask``


@dataclass(eq=False)
class Span:
    """The tokens of one sequence in a packed batch."""

    sequence: CachedSequence
    begin: int  # index of its first token in the batch
    end: int  # exclusive
    staged_mask: torch.Tensor  # [num_tokens, num_staged] bool; columns: staged earlier in this step, then these tokens
    staged_positions: torch.Tensor  # [num_staged] int64
    is_chain: bool = False  # nothing else is staged, positions are consecutive, and the mask is causal
    windowed_mask: torch.Tensor | None = None  # same shape; mask in layers with a sliding window; None: staged_mask
    _masks: dict[Hashable, torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in this forward."""
        return self.end - self.begin

    @property
    def num_staged(self) -> int:
        """Tokens staged in this step, those of this forward included."""
        return len(self.staged_positions)

    @property
    def num_visible(self) -> int:
        """Committed and staged tokens."""
        return self.sequence.length + self.num_staged

    @property
    def visible(self) -> slice:
        """Slots visible to this forward: committed tokens, then all staged tokens, this forward's last."""
        return slice(self.sequence.start, self.sequence.start + self.num_visible)

    def staged_mask_for(self, window: int | None) -> torch.Tensor:
        """Return the mask among staged tokens for layers with this window.  -> [num_tokens, num_staged] bool"""
        return self.staged_mask if window is None or self.windowed_mask is None else self.windowed_mask

    def mask(self, rules: AttentionRules, like: torch.Tensor, repeats: int = 1) -> torch.Tensor | None:
        """Return the additive mask over the visible slots, or None if all of them may be attended to.

        Sliding windows and chunks count positions, not slots: a node's position is its root's plus its depth.

        Returns:
            [repeats * num_tokens, num_visible], the mask ``repeats`` times, in ``like``'s dtype and device; cached for
            the forward.
        """
        key = rules.window, rules.chunk, repeats, like.dtype, like.device
        if key not in self._masks:
            mask = self._additive_mask(rules.window, rules.chunk, like.dtype, like.device)
            self._masks[key] = mask if mask is None else mask.repeat(repeats, 1)
        return self._masks[key]

    def _additive_mask(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | None:
        if not self.num_staged:  # queries over committed tokens, which the caller has cut to the window
            return None
        allowed = self.seen(window, chunk, device)
        # On another device, reading the mask would make the host wait.
        if self.num_tokens == 1 and device.type == "cpu" and bool(allowed.all()):
            return None
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))

    def seen(self, window: int | None, chunk: int | None, device: torch.device) -> torch.Tensor:
        """Return which visible slots each token may attend to.  -> [num_tokens, num_visible] bool"""
        num_tokens, length = self.num_tokens, self.sequence.length
        staged_mask, staged_positions = to_device((self.staged_mask_for(window), self.staged_positions), device)
        prefix = torch.ones(num_tokens, length, dtype=torch.bool, device=device)
        allowed = torch.cat((prefix, staged_mask), dim=1)
        if window is not None or chunk is not None:
            keys = torch.cat((torch.arange(length, device=device), staged_positions))
            queries = staged_positions[-num_tokens:, None]
            if window is not None:
                allowed = allowed & (queries - keys < window)
            if chunk is not None:
                allowed = allowed & (queries // chunk == keys // chunk)
        return allowed


@dataclass(eq=False)
class PackedBatch:
    """Tokens of several sequences in one forward, with the slots that one kind of layer sees."""

    spans: list[Span]
    visible: list[slice]  # per span: the slots it sees, in the layer's K and V
    is_padded: bool = False  # plans are padded to bucket sizes too
    plans: dict[Hashable, Any] = field(default_factory=dict)  # by function, device and arguments; see :meth:`plan`

    @classmethod
    def of(cls, parts: Sequence[NewTokens], is_padded: bool = False) -> PackedBatch:
        """Return the batch of these sequences' tokens, in this order, for layers that see the whole pool."""
        spans, begin = [], 0
        for part in parts:
            assert part.sequence.length + len(part.positions) <= part.sequence.capacity
            end = begin + len(part.input_ids)
            span = Span(part.sequence, begin, end, part.mask, part.positions, part.is_chain, part.windowed_mask)
            spans.append(span)
            begin = end
        return cls(spans, [span.visible for span in spans], is_padded)

    @property
    def own_slots(self) -> torch.Tensor:
        """Slots in which the batch's K and V are staged.  [num_tokens] int64"""
        pairs = zip(self.spans, self.visible, strict=True)
        return torch.cat([torch.arange(slots.stop - span.num_tokens, slots.stop) for span, slots in pairs])

    def plan(self, make: Callable[..., Any], device: torch.device, *arguments: Hashable) -> Any:
        """Return ``make(batch, *arguments)`` on ``device``; it is computed once and shared by all layers."""
        if (key := (make, device, *arguments)) not in self.plans:
            self.plans[key] = to_device(make(self, *arguments), device).completed()
        return self.plans[key]


class PlannedBatch:
    """Packed batch during the capture of a forward: only its plans are known."""

    def __init__(self, plans: dict[Hashable, Any], seen: torch.Tensor | None = None):
        """Complete the plans; ``seen`` [num_values] bool is the table that masks index, None if they are boolean."""
        self._plans = {key: plan.completed(seen) for key, plan in plans.items()}

    def plan(self, *key: Hashable) -> Any:
        """Return a plan that was made before the forward."""
        return self._plans[key]

    @property
    def spans(self) -> list[Span]:
        """Raise RuntimeError: spans depend on sequence lengths."""
        raise RuntimeError(NO_LENGTHS)

    @property
    def visible(self) -> list[slice]:
        """Raise RuntimeError: visible slots depend on sequence lengths."""
        raise RuntimeError(NO_LENGTHS)


class Slots:
    """Slot indices, copied to each device at first use."""

    def __init__(self, slots: torch.Tensor):
        self._source = slots
        self._by_device = {slots.device: slots}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the slots on a device.  -> [num_slots] int64"""
        if device not in self._by_device:
            self._by_device[device] = to_device(self._source, device)
        return self._by_device[device]
