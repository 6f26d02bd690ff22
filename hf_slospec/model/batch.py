"""Rules by which an attention layer weighs the keys that a token may see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hf_slospec.model.transfer import to_device


class AttentionRules(NamedTuple):
    """Arguments of a layer's attention beside query, key and value, the same for all tokens of a
    forward.
    """

    scaling: float  # scores are multiplied by it
    window: int | None = None  # a token sees itself and the window - 1 positions before it
    softcap: float | None = None  # scores are squeezed into (-softcap, softcap)
    sinks: torch.Tensor | None = (
        None  # [num_heads] logits that take probability but contribute no value
    )
    chunk: int | None = None  # positions per chunk; no token sees beyond its own chunk
    bias: torch.Tensor | None = (
        None  # [num_heads, num_distances] added to scores; the last one is for all farther keys
    )

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores after the softcap, if there is one.  -> shape of ``scores``"""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


Encoded = dict[
    int, tuple[torch.Tensor, torch.Tensor]
]  # by layer: K and V of one row's encoder, [heads, length, dim]


class Stored(NamedTuple):
    """Shape of one token's K or V in one layer; the two may differ (multi-head latent attention,
    autocast).
    """

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
        """Return the shape of one token's K or V, from a layer's tensor [batch, num_heads,
        num_tokens, dim].
        """
        return cls(tensor.shape[1], tensor.shape[-1], tensor.dtype, tensor.device)


class LayerShape(NamedTuple):
    """Shapes of the tensors that one attention layer stores per token."""

    key: Stored
    value: Stored
    index_key: Stored | None = (
        None  # key of an indexer, which chooses the keys that the layer attends to
    )

    @property
    def stored(self) -> list[Stored]:
        """Shapes of all stored tensors."""
        return [shape for shape in self if shape is not None]


class SequenceStates(Protocol):
    """States of one sequence in layers that keep one in place of K and V.

    A state cannot be rolled back, so what a step's nodes add to it stays apart until it is known
    which of them were committed."""

    length: int  # tokens that the states include
    kept: Sequence[int] | None  # staged nodes that were committed; None: the first ones

    def take_in(self, length: int, num_earlier: int = 0) -> None:
        """Advance the states to ``length`` committed tokens, and drop what an earlier step staged.

        Args:
            num_earlier: nodes that earlier forwards of this step staged, which stay staged.
        """

    def copy(self) -> SequenceStates:
        """Return the states for another sequence with the same first ``length`` tokens."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence's range of slots: committed tokens, then room for the tokens that a step stages.

    Only ``length`` tells which tokens are committed, so dropping a rejected token's K/V touches no
    memory. ``start`` and ``capacity`` change when room is made for others or the pool is enlarged.
    """

    start: int = 0
    capacity: int = 0
    length: int = 0  # committed tokens
    staged_end: int = 0  # slots up to the last staged token; 0: what was staged has been committed
    position_offset: int = (
        0  # new tokens' positions minus their indices: tokens of an image may share positions
    )
    prompt_len: int = (
        0  # tokens that stock decoding forwards together; length-dependent RoPE is chosen by it
    )
    num_padding: int = 0  # tokens by which the longest prompt of its batch exceeds its prompt
    # [prompt_len, hidden] in place of the embeddings of the prompt's tokens
    embeds: torch.Tensor | None = None
    weights_state: int | None = None  # see Sequences; that of the model when tokens were cached
    states: SequenceStates | None = None  # None if all layers keep K and V
    encoded: Encoded | None = None  # what cross-attention attends to; None without an encoder

    @property
    def num_written(self) -> int:
        """Return the number of slots whose K/V moves with the sequence: other calls may run while
        tokens are staged.
        """
        return min(max(self.length, self.staged_end), self.capacity)

    def last_slots(self, number: int) -> torch.Tensor:
        """Return the slots of the last cached tokens.  -> [number] int64, on the host"""
        assert number <= self.length, "slots before a sequence are another's"
        end = self.start + self.length
        return torch.arange(end - number, end, device="cpu")

    def present_states(self) -> SequenceStates | None:
        """Return the states after the cached tokens; None if the model has none."""
        if self.states is not None:
            self.states.take_in(self.length)
        return self.states

    def truncate(self, length: int) -> None:
        """Keep at most ``length`` tokens, or none if a recurrent state already contains later ones."""
        if length < self.length and self.states is not None and length < self.states.length:
            self.states = None
            length = 0
        self.length = min(self.length, length)

    def commit(self, nodes: Sequence[int]) -> None:
        """Commit staged nodes that form a path, after their K/V was moved to the end of the
        committed tokens.
        """
        self.length += len(nodes)
        self.staged_end = 0
        if self.states is not None:
            self.states.kept = nodes


# First index in a table of mask values whose value varies: 0 is False, and 1 is True.
FIRST_SEEN = 2
# Kernels take longer chains as causal, as the work of a dense block is quadratic in its tokens.
MAX_DENSE = 64


class AttentionLayer(NamedTuple):
    """Cache layout and mask properties of an attention layer."""

    shape: LayerShape
    window: int | None = (
        None  # sliding window: a token attends to itself and the window - 1 positions before it
    )
    is_latent: bool = (
        False  # multi-head latent attention: the layer expands the cached tensors into K and V
    )
    chunk: int | None = (
        None  # chunked attention: positions per chunk; no token attends beyond its own chunk
    )
    layer_idx: int = 0  # index in the model, where layers that keep a state instead are counted too
    is_own: bool = False  # the layer's own code computes attention, over keys gathered for it
    counts_tokens: bool = (
        False  # the layer asks the cache for its length; in stock calls, this counts padding too
    )


@dataclass(eq=False)
class NewTokens:
    """Tokens of one sequence that a forward appends to those in the K/V pool; tensors are on the
    host or the device.
    """

    sequence: CachedSequence
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: (
        torch.Tensor
    )  # [num_staged] int64: tokens staged by earlier forwards of the step, then these
    # [num_tokens, num_staged] bool, True = may attend; or int64 on the host: indices into a table
    # of booleans on the device, which starts with False and True.
    mask: torch.Tensor
    embeds: torch.Tensor | None = None  # [num_tokens, hidden], replaces the embeddings of input_ids
    is_chain: bool = False  # nothing else is staged, and the mask is causal
    windowed_mask: torch.Tensor | None = (
        None  # same shape; mask in layers with a sliding window; None: ``mask``
    )

    @property
    def num_tokens(self) -> int:
        """Tokens in this forward."""
        return self.input_ids.shape[0]  # ``len`` of a tensor takes several times as long

    def one_by_one(self) -> Iterator[NewTokens]:
        """Yield each token as a part of its own, for forwards in this order; no token attends to
        later ones.
        """
        first = self.positions.shape[0] - self.num_tokens  # staged by earlier forwards
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
    begin: int  # index of its first token in the batch
    end: int  # exclusive
    staged_mask: (
        torch.Tensor
    )  # [num_tokens, num_staged] bool; columns: staged earlier in this step, then these tokens
    staged_positions: torch.Tensor  # [num_staged] int64
    is_chain: bool = (
        False  # nothing else is staged, positions are consecutive, and the mask is causal
    )
    windowed_mask: torch.Tensor | None = (
        None  # same shape; mask in layers with a sliding window; None: staged_mask
    )

    @property
    def num_tokens(self) -> int:
        """Tokens in this forward."""
        return self.end - self.begin

    @property
    def num_staged(self) -> int:
        """Tokens staged in this step, those of this forward included."""
        return self.staged_positions.shape[0]

    @property
    def num_visible(self) -> int:
        """Committed and staged tokens."""
        return self.sequence.length + self.num_staged

    @property
    def visible(self) -> slice:
        """Slots visible to this forward: committed tokens, then all staged tokens, this forward's
        last.
        """
        return slice(self.sequence.start, self.sequence.start + self.num_visible)

    def staged_mask_for(self, window: int | None) -> torch.Tensor:
        """Return the mask among staged tokens for layers with this window.  -> [num_tokens,
        num_staged] bool
        """
        return (
            self.staged_mask if window is None or self.windowed_mask is None else self.windowed_mask
        )


class Plan:
    """Base of what one kind of layer reads of a packed batch: tensors, and numbers that the host
    reads.

    Plans are made on the host, before the forward, and copied to the device with its other inputs.
    """

    def completed(self, seen: torch.Tensor | None = None) -> Any:
        """Return the plan with what is made on the device, where it is used.

        ``seen`` [num_values] bool is the table that masks index, None if they are boolean.
        """
        del seen
        return self


class Plans(Protocol):
    """Plans of a packed batch, made once for all layers of a kind."""

    def plan(self, make: Callable[..., Plan], device: torch.device, *arguments: Hashable) -> Any:
        """Return ``make(batch, *arguments)``, completed on ``device``."""


@dataclass(eq=False)
class PackedBatch:
    """Tokens of several sequences in one forward, with the slots that one kind of layer sees."""

    spans: list[Span]
    visible: list[slice]  # per span: the slots it sees, in the layer's K and V
    is_padded: bool = False  # plans are padded to bucket sizes too
    plans: dict[Any, Any] = field(
        default_factory=dict
    )  # completed, by function, device and arguments

    @classmethod
    def of(cls, parts: Sequence[NewTokens], is_padded: bool = False) -> PackedBatch:
        """Return the batch of these sequences' tokens, in this order, for layers that see the whole
        pool.
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

    def plan(self, make: Callable[..., Plan], device: torch.device, *arguments: Hashable) -> Any:
        """Return a plan, which all layers share; it is made now if no earlier forward has requested
        it.
        """
        if (key := (make, device, *arguments)) not in self.plans:
            self.plans[key] = to_device(make(self, *arguments), device).completed()
        return self.plans[key]


class PlannedBatch:
    """Packed batch during a forward that reads tensors only: its plans, made before."""

    def __init__(self, plans: dict[Any, Plan], seen: torch.Tensor | None = None):
        """Complete the plans, which are on the device; for ``seen`` see :meth:`Plan.completed`."""
        self._plans = {key: plan.completed(seen) for key, plan in plans.items()}

    def plan(self, *key: Hashable) -> Any:
        """Return a plan."""
        return self._plans[key]


@dataclass(frozen=True, eq=False)
class SlotPlan(Plan):
    """Plan that holds K/V slot indices."""

    slots: torch.Tensor  # [num_slots] int64


def plan_own(batch: PackedBatch) -> SlotPlan:
    """Return the slots in which the K and V of the batch's tokens are staged."""
    pairs = zip(batch.spans, batch.visible, strict=True)
    offsets = np.array(
        [slots.stop - span.end for span, slots in pairs]
    )  # a token's slot, less its index in the batch
    lengths = [span.num_tokens for span in batch.spans]
    return SlotPlan(torch.from_numpy(offsets.repeat(lengths) + np.arange(batch.spans[-1].end)))


def plan_visible(batch: PackedBatch) -> SlotPlan:
    """Return the slots that the batch sees, sequence after sequence."""
    return SlotPlan(
        torch.cat([torch.arange(slots.start, slots.stop, device="cpu") for slots in batch.visible])
    )


def plan_over_visible(batch: PackedBatch, make: Callable[..., Plan], *arguments: Hashable) -> Plan:
    """Return a plan for layers whose K and V are those of :func:`plan_visible`."""
    ends = itertools.accumulate(span.num_visible for span in batch.spans)
    visible = [
        slice(end - span.num_visible, end) for span, end in zip(batch.spans, ends, strict=True)
    ]
    return make(PackedBatch(batch.spans, visible), *arguments)


@dataclass(frozen=True, eq=False)
class OverVisible:
    """Plans for layers whose K and V are those of :func:`plan_visible`."""

    batch: Plans

    def plan(self, make: Callable[..., Plan], device: torch.device, *arguments: Hashable) -> Any:
        """Return a plan; see :meth:`Plans.plan`."""
        return self.batch.plan(plan_over_visible, device, make, *arguments)
