"""Plans of the ``flash`` attention backend, which divide a batch's keys between kernels and dense
attention, and the merge of both results by log-sum-exp in fp32.

The backend is in ``flash_attention.py``, the kernels in ``flash_kernels.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.cuda.graphs import bucket_for
from hf_slospec.model.batch import MAX_DENSE, AttentionPlan, AttentionRules, PackedBatch, Span


def merged_attention(
    query: torch.Tensor,  # [batch, num_queries, head_dim]
    key: torch.Tensor,  # [batch, num_keys, head_dim]
    value: torch.Tensor,  # [batch, num_keys, value_dim]
    # [batch, num_queries, num_keys] f32: 0, or -inf where a query may not attend
    bias: torch.Tensor,
    outs: torch.Tensor,  # [batch, num_queries, num_parts, value_dim]: attention over other keys
    # [batch, num_queries, num_parts] f32: log-sum-exps of outs, -inf where a part has no keys
    lses: torch.Tensor,
    rules: AttentionRules,  # its sinks are not read: they are among the parts
) -> torch.Tensor:
    """Return attention over ``key`` and the keys that ``outs`` were computed from, in one softmax.

    Each part of ``outs`` enters the softmax like one key, with its log-sum-exp as score and its out
    as value; a sink is a part with an out of 0. Every query must attend to at least one key.

    Returns:
        [batch, num_queries, value_dim] f32.
    """
    query = query.float()
    key_t = key.float().transpose(1, 2)
    if rules.softcap is None:
        scores = torch.baddbmm(bias, query, key_t, alpha=rules.scaling)
    else:
        scores = rules.capped(query @ key_t * rules.scaling) + bias
    weights = torch.cat((scores, lses), -1).softmax(-1)
    num_keys = key.shape[1]
    parts = (weights[..., num_keys:, None] * outs).sum(-2)
    return torch.baddbmm(parts, weights[..., :num_keys], value.float())


def weigh_sinks(
    out: torch.Tensor,  # [num_queries, num_heads, value_dim]
    lse: torch.Tensor,  # [num_queries, num_heads] f32
    sinks: torch.Tensor,  # [num_heads]: logits that take probability but contribute no value
) -> torch.Tensor:
    """Return attention with sinks in the softmax, from ``out`` and ``lse`` without sinks.  ->
    [num_queries, num_heads, value_dim] f32
    """
    return out.float() * (lse - sinks.float()).sigmoid()[..., None]


# A kernel runs one thread block per entry and KV head. Long ranges of keys are cut into pieces of
# about PIECE_KEYS keys or more, until ENOUGH_BLOCKS thread blocks fill a GPU (an estimate).
PIECE_KEYS = 512
ENOUGH_BLOCKS = 256


@dataclass(frozen=True, eq=False)
class Entries:
    """Arguments of one varlen kernel call, for entries: ranges of KV slots, each with the queries
    that attend to it.
    """

    token_indices: torch.Tensor  # [num_queries] int64: the queries' tokens, by index in the batch
    cu_queries: torch.Tensor  # [num_entries + 1] int32: first query of each entry, and the end
    cu_keys: torch.Tensor  # [num_entries + 1] int32: first slot of each entry, and the end
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, ranges: Sequence[tuple[range, slice]], repeats: int = 1) -> Entries:
        """Return an entry for each range of slots, and one without queries for each gap.

        Args:
            ranges: pairs of tokens, by index in the batch, and the slots that they attend to, in
                ascending order of slots.
            repeats: queries per token.
        """
        num_queries = []
        edges = [ranges[0][1].start]
        for tokens, slots in ranges:
            if slots.start > edges[-1]:
                num_queries.append(0)
                edges.append(slots.start)
            num_queries.append(len(tokens) * repeats)
            edges.append(slots.stop)
        assert all(a <= b for a, b in itertools.pairwise(edges)), "ranges of slots overlap"
        ends = list(itertools.accumulate(num_queries, initial=0))
        return cls(
            torch.tensor([token for tokens, _ in ranges for token in tokens], device="cpu"),
            torch.tensor(ends, dtype=torch.int32, device="cpu"),
            torch.tensor(edges, dtype=torch.int32, device="cpu"),
            max(num_queries),
            max(slots.stop - slots.start for _, slots in ranges),
        )

    def padded(self, num_entries: int, max_queries: int, max_keys: int) -> Entries:
        """Pad to ``num_entries`` varlen entries with the given max_seqlen_q and max_seqlen_k."""
        missing = num_entries + 1 - len(self.cu_keys)
        assert missing >= 0 and max_queries >= self.max_queries and max_keys >= self.max_keys
        cu_queries, cu_keys = (
            torch.cat((cu, cu[-1:].expand(missing))) for cu in (self.cu_queries, self.cu_keys)
        )
        return Entries(self.token_indices, cu_queries, cu_keys, max_queries, max_keys)


@dataclass(frozen=True, eq=False)
class Block:
    """Dense attention of the tokens of several sequences, over the keys that only some of a
    sequence's tokens attend to. All sequences are padded to the same numbers of tokens and keys.

    Padding repeats tokens and keys of the same sequence, so that values of one never enter products
    of another."""

    token_indices: torch.Tensor  # [num_sequences, num_queries] int64, in the batch
    # [num_sequences, num_keys] int64: the keys' slots. num_keys is 0 if each sequence has only one
    # token, which attends to all keys of its range.
    slots: torch.Tensor
    # [num_sequences, num_queries, num_keys] bool, True = may attend; or int64, see NewTokens.mask
    mask: torch.Tensor
    # [num_pieces, num_sequences, num_queries] int64: index in `Entries` of the query that attends
    # to this piece of the sequence's range, for the same token
    pieces: torch.Tensor
    # [num_pieces, num_sequences, num_queries] bool, True = the piece has no keys; None: all have
    is_empty: torch.Tensor | None
    # [num_real] int64: indices, in the flattened [num_sequences * num_queries], of the queries that
    # are not padding; None: none is padding
    real_queries: torch.Tensor | None
    real_token_indices: torch.Tensor  # [num_real] int64: these queries' tokens in the batch
    # [num_sequences * num_kv_heads, num_queries * groups, num_keys] f32: the mask, as 0 or -inf;
    # None before `Packing.completed`
    bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Packing(AttentionPlan):
    """Attention plan of a batch, for layers with the same window and numbers of heads.

    A causal kernel call computes long chains. For all other sequences, a kernel call computes
    attention over the keys that all tokens of a sequence attend to, and blocks over other keys."""

    chains: Entries | None  # None: there are no long chains
    ranges: Entries | None  # query heads are folded into queries; None if all ranges are empty
    blocks: list[Block]
    groups: int  # query heads per KV head
    num_kv_heads: int

    def completed(self, seen: torch.Tensor | None = None) -> Packing:
        """Return a copy with each block's mask as an additive bias for its folded query heads.

        Biases are made on the layers' device, as they are larger than their masks. ``seen``: table
        of booleans that the masks index; None: the masks are boolean."""
        masks = [block.mask if seen is None else seen[block.mask] for block in self.blocks]
        pairs = zip(self.blocks, masks, strict=True)
        blocks = [replace(block, bias=self._bias(mask)) for block, mask in pairs]
        return replace(self, blocks=blocks)

    def _bias(self, mask: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
        heads = bias[:, None, :, None].expand(-1, self.num_kv_heads, -1, self.groups, -1)
        return heads.flatten(2, 3).flatten(0, 1)


def pack(batch: PackedBatch, window: int | None, num_heads: int, num_kv_heads: int) -> Packing:
    """Return the plan of a batch for layers with this window and these numbers of heads, made on
    the host.
    """
    chains = []
    split = []
    for span, slots in sorted(
        zip(batch.spans, batch.visible, strict=True), key=lambda pair: pair[1].start
    ):
        if span.is_chain and span.num_tokens > MAX_DENSE:
            chains.append((range(span.begin, span.end), slots))
        else:
            split.append((span, slots))
    groups = num_heads // num_kv_heads
    ranges, blocks = _split(split, window, groups, num_kv_heads, batch.is_padded)
    return Packing(Entries.of(chains) if chains else None, ranges, blocks, groups, num_kv_heads)


def _split(
    spans: list[tuple[Span, slice]],
    window: int | None,
    groups: int,
    num_kv_heads: int,
    is_padded: bool,
) -> tuple[Entries | None, list[Block]]:
    if not spans:
        return None, []
    common = [_common(span, slots, window) for span, slots in spans]
    longest = max(slots.stop - slots.start for slots in common)
    if is_padded:
        longest = max(PIECE_KEYS, 1 << max(longest - 1, 0).bit_length())
    num_pieces = min(
        -(-longest // PIECE_KEYS), max(1, ENOUGH_BLOCKS // (len(spans) * num_kv_heads))
    )
    ranges: list[tuple[range, slice]] = []
    by_size: dict[int, list[_BlockPart]] = {}
    num_queries = 0
    for (span, slots), seen in zip(spans, common, strict=True):
        pieces = _cut(seen, num_pieces)
        ranges += [(range(span.begin, span.end), piece) for piece in pieces]
        part = _BlockPart.of(
            span, slots, seen, window, num_queries, [piece.start == piece.stop for piece in pieces]
        )
        # One block per power of four of the sequences' numbers of keys, so that a large tree does
        # not pad all small ones to its size.
        size = ((len(part.slots) - 1).bit_length() // 2) if len(part.slots) else -1
        by_size.setdefault(0 if is_padded else size, []).append(part)
        num_queries += num_pieces * span.num_tokens
    entries = Entries.of(ranges, groups) if num_pieces else None
    if is_padded and entries is not None:
        max_tokens = bucket_for(max(span.num_tokens for span, _ in spans))
        entries = entries.padded(2 * len(ranges), max_tokens * groups, -(-longest // num_pieces))
    return entries, [_block(parts, is_padded) for parts in by_size.values()]


def _common(span: Span, slots: slice, window: int | None) -> slice:
    """Return a range of slots that every token of the span attends to."""
    if span.num_staged == 1:  # a single token also attends to itself
        return slice(
            slots.start if window is None else max(slots.start, slots.stop - window), slots.stop
        )
    length = span.sequence.length
    # The positions are on the device, so this is a bound: a token is at most num_staged positions
    # behind the last committed one.
    dropped = 0 if window is None else min(max(length + span.num_staged - window, 0), length)
    return slice(slots.start + dropped, slots.start + length)


def _cut(slots: slice, num_pieces: int) -> list[slice]:
    num_keys = slots.stop - slots.start
    edges = [
        slots.start + num_keys * piece // max(num_pieces, 1) for piece in range(num_pieces + 1)
    ]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


@dataclass(frozen=True, eq=False)
class _BlockPart:
    """Tokens and keys of one sequence in a :class:`Block`."""

    span: Span
    slots: np.ndarray  # [num_keys] int64: slots that only some of the tokens attend to
    last_slot: int  # the sequence's last visible slot, with which ``slots`` are padded
    mask: torch.Tensor  # [num_tokens, num_keys] bool
    # Index of the sequence's first query in `Entries`: there, all its tokens attend to the first
    # piece of its range, then all tokens to the second piece, and so on.
    first_query: int
    is_empty: list[bool]  # per piece of the sequence's range: it has no keys

    @classmethod
    def of(
        cls,
        span: Span,
        slots: slice,
        common: slice,
        window: int | None,
        first_query: int,
        is_empty: list[bool],
    ) -> _BlockPart:
        some = np.arange(common.stop, slots.stop)
        mask = span.staged_mask[:, : len(some)]
        if window is not None and len(some):
            first_common = common.start - slots.start
            # No token attends to earlier keys.
            first = min(max(span.sequence.length - window + 1, 0), first_common)
            edge = torch.arange(first, first_common, device=mask.device)
            positions = span.staged_positions
            key_positions = torch.cat((edge, positions))
            is_near = positions[-span.num_tokens :, None] - key_positions[None, :] < window
            mask = is_near * F.pad(span.staged_mask_for(window), (len(edge), 0), value=True)
            some = np.concatenate((np.arange(slots.start + first, common.start), some))
        return cls(span, some, slots.stop - 1, mask, first_query, is_empty)


def _block(parts: list[_BlockPart], is_padded: bool) -> Block:
    num_queries = max(part.span.num_tokens for part in parts)
    num_keys = max(len(part.slots) for part in parts)
    if is_padded:
        num_queries = bucket_for(num_queries)
        num_keys = bucket_for(num_keys) if num_keys else 0
    num_pieces = len(parts[0].is_empty)
    num_tokens, begins, last_slots, first_queries = np.array(
        [
            (each.span.num_tokens, each.span.begin, each.last_slot, each.first_query)
            for each in parts
        ]
    ).T[..., None]  # [num_sequences, 1] each
    token_offsets = np.minimum(np.arange(num_queries), num_tokens - 1)
    token_indices = token_offsets + begins  # [num_sequences, num_queries]
    slots = last_slots.repeat(num_keys, 1)
    for part_slots, part in zip(slots, parts, strict=True):
        part_slots[: len(part.slots)] = part.slots
    pieces = np.arange(num_pieces)[:, None, None] * num_tokens + token_offsets + first_queries
    is_empty = np.array([part.is_empty for part in parts], dtype=np.bool_)
    are_empty = np.broadcast_to(is_empty.T[..., None], pieces.shape)
    is_real = np.arange(num_queries) < num_tokens

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())  # contiguous, and owns its memory

    return Block(
        tensor(token_indices),
        tensor(slots),
        _stacked([part.mask for part in parts], num_queries, num_keys),
        tensor(pieces),
        tensor(are_empty) if is_padded or is_empty.any() else None,
        None if is_real.all() and not is_padded else tensor(np.flatnonzero(is_real)),
        tensor(token_indices[is_real]),
    )


def _stacked(masks: Sequence[torch.Tensor], num_queries: int, num_keys: int) -> torch.Tensor:
    """Return masks padded to one size.  -> [num_masks, num_queries, num_keys]

    Padding repeats the last query, as each must attend to some key, and adds masked keys.
    """
    # Neighbours of one shape are padded at once, which takes fewer operations.
    groups = [
        torch.stack(list(group))
        for _, group in itertools.groupby(masks, key=lambda mask: mask.shape)
    ]
    padded = [_padded(group, num_queries, num_keys) for group in groups]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def _padded(masks: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    num_masks, real_queries, keys = masks.shape
    if real_queries < num_queries:
        masks = torch.cat(
            (masks, masks[:, -1:].expand(num_masks, num_queries - real_queries, keys)), dim=1
        )
    return F.pad(masks, (0, num_keys - keys)) if keys < num_keys else masks
