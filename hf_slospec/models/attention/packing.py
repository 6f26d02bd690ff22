"""How a packed row is cut into calls of a flash-attention kernel and small dense blocks.

A variable-length kernel takes packed queries, packed keys and the cumulative lengths of both. Here the packed keys are
a layer's whole pool: what lies between the ranges wanted is given to entries without queries, which cost nothing. So no
key is copied and no block table is needed; entries only have to come in the order of their slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.models.attention.row import Row, Span

MAX_DENSE = 64  # longer chains are causal entries: the work of a dense block grows with the square of its tokens
# A kernel gives an entry and head to one block of threads: long ranges are cut until there are enough (not measured).
PIECE_KEYS, ENOUGH_BLOCKS = 512, 256


@dataclass(frozen=True, eq=False)
class Entries:
    """One call of a kernel: ranges of keys, each seen by some queries."""

    rows: torch.Tensor  # [num_queries] int64: tokens of the row, entry after entry
    cu_queries: torch.Tensor  # [num_entries + 1] int32
    cu_keys: torch.Tensor  # [num_entries + 1] int32, from the first range's first slot
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, ranges: Sequence[tuple[range, slice]], device: torch.device, repeats: int = 1) -> Entries:
        """``ranges``: tokens of the row and the slots they see, by ascending slots; ``repeats``: queries of a token."""
        num_queries, edges = [], [ranges[0][1].start]
        for tokens, slots in ranges:
            if slots.start > edges[-1]:
                num_queries.append(0)
                edges.append(slots.start)
            num_queries.append(len(tokens) * repeats)
            edges.append(slots.stop)
        assert all(a <= b for a, b in itertools.pairwise(edges)), "ranges of slots overlap"
        ends = list(itertools.accumulate(num_queries, initial=0))
        rows = [row for tokens, _ in ranges for row in tokens]
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.tensor(edges, dtype=torch.int32, device=device),
            max(num_queries),
            max(slots.stop - slots.start for _, slots in ranges),
        )


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """Tokens of several sequences and the keys that only some of each sequence's tokens see, padded to a rectangle."""

    rows: torch.Tensor  # [batch, num_queries] int64, tokens of the row
    slots: torch.Tensor  # [batch, num_keys] int64
    mask: torch.Tensor  # [batch, num_queries, num_keys] bool; False for all padding
    real: torch.Tensor  # [num_real] int64: which of the batch * num_queries are no padding
    places: torch.Tensor  # [num_real] int64: where these stand in Split.rows


@dataclass(frozen=True, eq=False)
class Split:
    """Tokens whose keys are split: ranges that all tokens of a sequence see, and what a dense block holds."""

    rows: torch.Tensor  # [num_split] int64, tokens of the row
    entries: Entries | None  # of the ranges, query heads folded; None if they are all empty
    pieces: torch.Tensor  # [num_pieces, num_split] int64: where the tokens stand in entries.rows
    is_empty: torch.Tensor  # [num_pieces, num_split] bool
    any_empty: bool
    blocks: list[DenseBlock]


@dataclass(frozen=True, eq=False)
class Packing:
    chains: Entries | None
    split: Split | None


def pack(row: Row, device: torch.device, window: int | None, num_heads: int, num_kv_heads: int) -> Packing:
    """Cut up a row, for layers on this device with this window and these numbers of heads."""
    in_order = sorted(zip(row.spans, row.visible, strict=True), key=lambda pair: pair[1].start)
    chains = [(span, slots) for span, slots in in_order if span.is_chain and span.num_tokens > MAX_DENSE]
    others = [(span, slots) for span, slots in in_order if not (span.is_chain and span.num_tokens > MAX_DENSE)]
    return Packing(
        Entries.of([(range(span.begin, span.end), slots) for span, slots in chains], device) if chains else None,
        _split(others, device, window, num_heads // num_kv_heads, num_kv_heads) if others else None,
    )


def _split(
    spans: list[tuple[Span, slice]], device: torch.device, window: int | None, groups: int, num_kv_heads: int
) -> Split:
    common = [_common(span, slots, window) for span, slots in spans]
    longest = max(slots.stop - slots.start for slots in common)
    num_pieces = max(1, min(-(-longest // PIECE_KEYS), ENOUGH_BLOCKS // (len(spans) * num_kv_heads)))
    ranges: list[tuple[range, slice]] = []
    pieces: list[list[int]] = [[] for _ in range(num_pieces)]
    is_empty: list[list[bool]] = [[] for _ in range(num_pieces)]
    num_queries = 0
    for (span, _), slots in zip(spans, common, strict=True):
        for piece, part in enumerate(_cut(slots, num_pieces)):
            ranges.append((range(span.begin, span.end), part))
            pieces[piece] += range(num_queries, num_queries + span.num_tokens)
            is_empty[piece] += [part.start == part.stop] * span.num_tokens
            num_queries += span.num_tokens
    return Split(
        torch.tensor([row for span, _ in spans for row in range(span.begin, span.end)], device=device),
        Entries.of(ranges, device, groups) if longest else None,
        torch.tensor(pieces, device=device),
        torch.tensor(is_empty, device=device),
        any(itertools.chain.from_iterable(is_empty)),
        _blocks(spans, common, device, window),
    )


def _common(span: Span, slots: slice, window: int | None) -> slice:
    """The slots that every token of the span sees for certain, one range."""
    if span.num_fresh == 1:  # a single token sees itself as well
        return slice(slots.start if window is None else max(slots.start, slots.stop - window), slots.stop)
    length = span.sequence.length
    # Positions are on the device. None is further from the root than there are fresh tokens.
    dropped = 0 if window is None else min(max(length + span.num_fresh - window, 0), length)
    return slice(slots.start + dropped, slots.start + length)


def _cut(slots: slice, num_pieces: int) -> list[slice]:
    num_keys = slots.stop - slots.start
    edges = [slots.start + num_keys * piece // num_pieces for piece in range(num_pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def _blocks(
    spans: list[tuple[Span, slice]], common: list[slice], device: torch.device, window: int | None
) -> list[DenseBlock]:
    """One block per power of four of keys, so that a large tree does not pad all small ones to its size."""
    by_size: dict[int, list[_Near]] = {}
    place = 0
    for (span, slots), seen in zip(spans, common, strict=True):
        if span.num_fresh > 1:
            near = _Near.of(span, slots, seen, window, place)
            by_size.setdefault((len(near.slots) - 1).bit_length() // 2, []).append(near)
        place += span.num_tokens
    return [_block(nears, device) for nears in by_size.values()]


@dataclass(frozen=True, eq=False)
class _Near:
    """The keys of a sequence that only some of its tokens see."""

    span: Span
    slots: np.ndarray  # [num_keys] int64
    mask: torch.Tensor  # [num_tokens, num_keys] bool
    place: int

    @classmethod
    def of(cls, span: Span, slots: slice, common: slice, window: int | None, place: int) -> _Near:
        fresh = np.arange(slots.stop - span.num_fresh, slots.stop)
        if window is None:
            return cls(span, fresh, span.fresh_mask, place)
        first_common = common.start - slots.start
        first = min(max(span.sequence.length - window + 1, 0), first_common)  # no token sees what is before it
        edge = torch.arange(first, first_common, device=span.fresh_mask.device)
        key_positions = torch.cat((edge, span.fresh_positions))
        is_near = span.fresh_positions[-span.num_tokens :, None] - key_positions[None, :] < window
        is_seen = F.pad(span.fresh_mask, (len(edge), 0), value=True)
        return cls(
            span, np.concatenate((np.arange(slots.start + first, common.start), fresh)), is_near & is_seen, place
        )


def _block(nears: list[_Near], device: torch.device) -> DenseBlock:
    num_queries = max(near.span.num_tokens for near in nears)
    num_keys = max(len(near.slots) for near in nears)
    rows, real, places = [], [], []
    slots = np.empty((len(nears), num_keys), dtype=np.int64)
    for index, near in enumerate(nears):
        num_own = near.span.num_tokens
        rows.append(np.minimum(np.arange(num_queries) + near.span.begin, near.span.end - 1))
        slots[index] = near.slots[np.minimum(np.arange(num_keys), len(near.slots) - 1)]
        real.append(np.arange(num_own) + index * num_queries)
        places.append(np.arange(num_own) + near.place)
    return DenseBlock(
        torch.from_numpy(np.stack(rows)).to(device),
        torch.from_numpy(slots).to(device),
        torch.stack(_padded([near.mask for near in nears], num_queries, num_keys)).to(device),
        torch.from_numpy(np.concatenate(real)).to(device),
        torch.from_numpy(np.concatenate(places)).to(device),
    )


def _padded(masks: Sequence[torch.Tensor], num_queries: int, num_keys: int) -> list[torch.Tensor]:
    sizes = [(num_keys - mask.shape[1], num_queries - mask.shape[0]) for mask in masks]
    return [
        F.pad(mask, (0, keys, 0, queries)) if keys or queries else mask
        for mask, (keys, queries) in zip(masks, sizes, strict=True)
    ]
