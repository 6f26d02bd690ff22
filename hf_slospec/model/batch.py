"""The packed batch: new tokens of several sequences in one forward, their K/V slots and masks, and
the per-layer arguments of attention.

:meth:`CachedSequence.commit` keeps the K/V of accepted nodes and so drops that of rejected nodes;
the tensors with the slots are in kv_cache.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hf_slospec.model.transfer import to_device


class AttentionRules(NamedTuple):
    """Arguments of a layer's attention other than query, key and value; they are the same for all
    tokens of a forward.
    """

    scaling: float  # scores are multiplied by it
    # Sliding window: a token attends to itself and the window - 1 positions before it.
    window: int | None = None
    softcap: float | None = None  # scores are squeezed into (-softcap, softcap)
    # [num_heads], attention sinks: logits that take part in the softmax but contribute no value
    sinks: torch.Tensor | None = None
    # Chunked attention: positions per chunk; a token attends only to keys of the chunk it is in.
    chunk: int | None = None
    # [num_heads, num_distances], added to scores by the distance of query and key; keys that are
    # farther away use the last entry.
    bias: torch.Tensor | None = None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the softcap to scores, if there is one.  -> shape of ``scores``"""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


# Layer index -> K and V of one row's encoder outputs, for cross-attention, each
# [num_heads, length, dim].
Encoded = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Stored(NamedTuple):
    """Shape, dtype and device of one token's K or V in one layer. K and V may differ (multi-head
    latent attention, autocast).
    """

    num_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes that one token's K or V takes in one layer."""
        return self.num_heads * self.dim * self.dtype.itemsize

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Stored:
        """Return the shape of one token's K or V in a tensor that a layer caches.

        Args:
            tensor: [batch, num_heads, num_tokens, dim].
        """
        return cls(tensor.shape[1], tensor.shape[-1], tensor.dtype, tensor.device)


class LayerShape(NamedTuple):
    """Shapes of the tensors that one attention layer stores per token."""

    key: Stored
    value: Stored
    # Key of the layer's indexer (sparse attention), which chooses the keys to attend to.
    index_key: Stored | None = None

    @property
    def stored(self) -> list[Stored]:
        """Shapes of K, V and, if the layer has an indexer, its key."""
        return [shape for shape in self if shape is not None]


class SequenceStates(Protocol):
    """Recurrent states of one sequence, in layers that keep a state (Mamba, linear attention) in
    place of K and V.

    A state cannot be rolled back, so the updates by a step's draft nodes are stored separately
    until it is known which nodes were committed.
    """

    length: int  # number of committed tokens that the states include
    # Indices of the staged nodes that were committed; None: the first ones.
    kept: Sequence[int] | None

    def take_in(self, length: int, num_earlier: int = 0) -> None:
        """Advance the states to ``length`` committed tokens, and drop the nodes that an earlier
        step staged.

        Args:
            num_earlier: number of nodes that earlier forwards of this step staged; they stay
                staged.
        """

    def copy(self) -> SequenceStates:
        """Copy the states for another sequence with the same first ``length`` tokens."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence's range of slots in the K/V pool: slots of committed tokens, then slots of staged
    tokens. A token is staged when a forward writes its K/V, and committed when the engine accepts
    it.

    Only ``length`` says how many tokens are committed, so dropping a rejected token's K/V touches
    no memory. ``start`` and ``capacity`` change when room is made for other sequences or the pool
    is enlarged.
    """

    start: int = 0  # index of the first slot
    capacity: int = 0  # number of slots
    length: int = 0  # number of committed tokens
    # Number of slots up to the last staged token; 0: no tokens are staged.
    staged_end: int = 0
    # Positions of new tokens minus their indices; not 0 where tokens of an image share positions.
    position_offset: int = 0
    # Number of prompt tokens. Stock decoding processes them in one forward, so this number decides
    # the frequencies of length-dependent RoPE.
    prompt_len: int = 0
    num_padding: int = 0  # padding tokens: longest prompt of the call minus prompt_len
    # [prompt_len, hidden], replaces the embeddings of the prompt's tokens
    embeds: torch.Tensor | None = None
    # State of the model's weights when the tokens were cached, see Sequences.weights_state.
    weights_state: int | None = None
    states: SequenceStates | None = None  # recurrent states; None if all layers keep K and V
    encoded: Encoded | None = None  # K and V of the encoder's outputs; None without an encoder

    @property
    def num_written(self) -> int:
        """Number of slots whose K/V must be copied when the sequence moves, staged tokens included:
        other calls may move sequences while tokens are staged.
        """
        return min(max(self.length, self.staged_end), self.capacity)

    def last_slots(self, number: int) -> torch.Tensor:
        """Return the slots of the last committed tokens.  -> [number] int64, on the host"""
        assert number <= self.length, "slots before a sequence are another's"
        end = self.start + self.length
        return torch.arange(end - number, end, device="cpu")

    def present_states(self) -> SequenceStates | None:
        """Return the states advanced to the committed tokens; None if the model has none."""
        if self.states is not None:
            self.states.take_in(self.length)
        return self.states

    def truncate(self, length: int) -> None:
        """Drop the K/V of all tokens after the first ``length``. Drops all tokens if a recurrent
        state already contains later ones, as it cannot be rolled back.
        """
        if length < self.length and self.states is not None and length < self.states.length:
            self.states = None
            length = 0
        self.length = min(self.length, length)

    def commit(self, nodes: Sequence[int]) -> None:
        """Commit staged nodes; their K/V has been moved to the slots right after the committed
        tokens.

        Args:
            nodes: indices of the committed tokens among the staged ones, in the order of the path.
        """
        self.length += len(nodes)
        self.staged_end = 0
        if self.states is not None:
            self.states.kept = nodes


# Masks may hold indices into a table of booleans on the device. Entry 0 is False, entry 1 is True,
# and from this index on the entries vary.
FIRST_SEEN = 2
# Tokens. Kernels take a dense mask for chains of at most this length; longer chains use causal
# attention, as the work of a dense mask is quadratic in the number of tokens.
MAX_DENSE = 64


class AttentionLayer(NamedTuple):
    """Cache layout and mask properties of an attention layer."""

    shape: LayerShape
    # Sliding window: a token attends to itself and the window - 1 positions before it.
    window: int | None = None
    # Multi-head latent attention: the layer expands the cached tensors into K and V.
    is_latent: bool = False
    # Chunked attention: positions per chunk; a token attends only to keys of the chunk it is in.
    chunk: int | None = None
    layer_idx: int = 0  # index among all layers of the model, including layers that keep a state
    # Attention is computed by the layer itself, not through transformers' attention interface;
    # keys are gathered for it.
    is_own: bool = False
    # The layer asks the cache for its length, which includes padding in stock calls.
    counts_tokens: bool = False


@dataclass(eq=False)
class NewTokens:
    """New tokens of one sequence in a forward, which follow its committed tokens in the K/V pool.
    Tensors are on the host or on the device.
    """

    sequence: CachedSequence
    input_ids: torch.Tensor  # [num_tokens] int64
    # [num_staged] int64: positions of the tokens that earlier forwards of this step staged, then of
    # the new tokens
    positions: torch.Tensor
    # [num_tokens, num_staged] bool, True = may attend; or int64 on the host: indices into a table
    # of booleans on the device, which starts with False and True (see FIRST_SEEN).
    mask: torch.Tensor
    embeds: torch.Tensor | None = None  # [num_tokens, hidden], replaces the embeddings of input_ids
    # No other tokens are staged, positions are consecutive, and the mask is causal.
    is_chain: bool = False
    # Mask of layers with a sliding window, same shape as ``mask``; None: these layers use ``mask``.
    windowed_mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]  # ``len`` of a tensor takes several times as long

    def one_by_one(self) -> Iterator[NewTokens]:
        """Yield one NewTokens per token, to be computed by one forward each, in this order. No
        token attends to a later one.
        """
        # Number of tokens that earlier forwards of this step staged.
        first = self.positions.shape[0] - self.num_tokens
        for row in range(self.num_tokens):
            token = slice(row, row + 1)
            staged = slice(first + row + 1)
            embeds = None if self.embeds is None else self.embeds[token]
            windowed = None if self.windowed_mask is None else self.windowed_mask[token, staged]
            columns = (
                self.input_ids[token],
                self.positions[staged],
                self.mask[token, staged],
                embeds,
            )
            yield NewTokens(self.sequence, *columns, windowed_mask=windowed)


@dataclass(eq=False)
class Span:
    """The tokens of one sequence in a packed batch."""

    sequence: CachedSequence
    begin: int  # index in the batch of the sequence's first token
    end: int  # index in the batch after the sequence's last token
    # [num_tokens, num_staged] bool, True = may attend. Columns: the tokens that earlier forwards of
    # this step staged, then the tokens of this forward.
    staged_mask: torch.Tensor
    staged_positions: torch.Tensor  # [num_staged] int64, positions of the columns' tokens
    # No other tokens are staged, positions are consecutive, and the mask is causal.
    is_chain: bool = False
    # Mask of layers with a sliding window, same shape as ``staged_mask``; None: staged_mask.
    windowed_mask: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of the sequence's tokens in this forward."""
        return self.end - self.begin

    @property
    def num_staged(self) -> int:
        """Number of the sequence's tokens staged in this step, including this forward's."""
        return self.staged_positions.shape[0]

    @property
    def num_visible(self) -> int:
        """Number of the sequence's committed and staged tokens, all of which have a slot."""
        return self.sequence.length + self.num_staged

    @property
    def visible(self) -> slice:
        """Slots that this forward reads: first those with committed tokens, then those with staged
        tokens. The tokens of this forward are the last ones.
        """
        return slice(self.sequence.start, self.sequence.start + self.num_visible)

    def staged_mask_for(self, window: int | None) -> torch.Tensor:
        """Return the mask among staged tokens, for layers with this sliding window.  ->
        [num_tokens, num_staged] bool
        """
        return (
            self.staged_mask if window is None or self.windowed_mask is None else self.windowed_mask
        )


class AttentionPlan:
    """Base of the tensors and numbers that layers with the same properties read of a packed batch,
    such as masks and slot indices.

    Plans are made on the host before the forward and copied to the device with the forward's other
    inputs.
    """

    def completed(self, seen: torch.Tensor | None = None) -> Any:
        """Return the plan with the tensors added that are made on the device rather than copied to
        it.

        Args:
            seen: [num_values] bool, the table that masks hold indices into; None: masks are
                boolean.
        """
        del seen
        return self


class Plans(Protocol):
    """Source of a packed batch's plans, each made once for all layers that request it."""

    def plan(
        self, make: Callable[..., AttentionPlan], device: torch.device, *arguments: Hashable
    ) -> Any:
        """Return the plan ``make(batch, *arguments)``, completed, on ``device``."""


@dataclass(eq=False)
class PackedBatch:
    """New tokens of several sequences in one forward, with the slots that layers read."""

    spans: list[Span]
    visible: list[slice]  # per span: the slots that its tokens read, in the layers' K and V tensors
    is_padded: bool = False  # plans have to be padded to bucket sizes, as for CUDA graphs
    # (make, device, *arguments) -> the completed plan
    plans: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[NewTokens], is_padded: bool = False) -> PackedBatch:
        """Return the batch of these parts (new tokens, one part per sequence), in this order, for
        layers whose K and V tensors are the whole pool.
        """
        spans = []
        begin = 0
        for part in parts:
            assert part.sequence.length + part.positions.shape[0] <= part.sequence.capacity
            end = begin + part.num_tokens
            span = Span(
                part.sequence,
                begin,
                end,
                part.mask,
                part.positions,
                part.is_chain,
                part.windowed_mask,
            )
            spans.append(span)
            begin = end
        return cls(spans, [span.visible for span in spans], is_padded)

    def plan(
        self, make: Callable[..., AttentionPlan], device: torch.device, *arguments: Hashable
    ) -> Any:
        """Return a plan that all layers share; make it if this batch does not have it yet."""
        if (key := (make, device, *arguments)) not in self.plans:
            self.plans[key] = to_device(make(self, *arguments), device).completed()
        return self.plans[key]


class PlannedBatch:
    """Plans of a packed batch for a forward that reads tensors only, such as a CUDA graph: all
    plans were made before it.
    """

    def __init__(self, plans: dict[Any, AttentionPlan], seen: torch.Tensor | None = None):
        """Call :meth:`AttentionPlan.completed` on plans that were already copied to the device.

        Args:
            plans: by the arguments of :meth:`plan`.
            seen: table of booleans that the masks index; None: the masks are boolean.
        """
        self._plans = {key: plan.completed(seen) for key, plan in plans.items()}

    def plan(self, *key: Hashable) -> Any:
        """Return the plan made for these arguments."""
        return self._plans[key]


@dataclass(frozen=True, eq=False)
class SlotPlan(AttentionPlan):
    """AttentionPlan that holds K/V slot indices."""

    slots: torch.Tensor  # [num_slots] int64


def plan_own(batch: PackedBatch) -> SlotPlan:
    """Return the slots that the K and V of the batch's new tokens are written to."""
    pairs = zip(batch.spans, batch.visible, strict=True)
    # Slot of a token minus its index in the batch, per span.
    offsets = np.array([slots.stop - span.end for span, slots in pairs])
    lengths = [span.num_tokens for span in batch.spans]
    return SlotPlan(torch.from_numpy(offsets.repeat(lengths) + np.arange(batch.spans[-1].end)))


def plan_visible(batch: PackedBatch) -> SlotPlan:
    """Return the slots that the batch's tokens read, one sequence after the other."""
    return SlotPlan(
        torch.cat([torch.arange(slots.start, slots.stop, device="cpu") for slots in batch.visible])
    )


def plan_over_visible(
    batch: PackedBatch, make: Callable[..., AttentionPlan], *arguments: Hashable
) -> AttentionPlan:
    """Return ``make(batch, *arguments)`` for layers whose K and V hold only the slots of
    :func:`plan_visible`, gathered in that order.
    """
    ends = itertools.accumulate(span.num_visible for span in batch.spans)
    visible = [
        slice(end - span.num_visible, end) for span, end in zip(batch.spans, ends, strict=True)
    ]
    return make(PackedBatch(batch.spans, visible), *arguments)


@dataclass(frozen=True, eq=False)
class OverVisible:
    """Source of plans for layers whose K and V hold only the slots of :func:`plan_visible`,
    gathered in that order.
    """

    batch: Plans

    def plan(
        self, make: Callable[..., AttentionPlan], device: torch.device, *arguments: Hashable
    ) -> Any:
        """Return the plan as :meth:`Plans.plan` does, for gathered slots."""
        return self.batch.plan(plan_over_visible, device, make, *arguments)
