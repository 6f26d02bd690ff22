"""Packed rows of every kind, and what attention must give of them: every token alone, in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_slospec.model.batch import (
    CachedSequence,
    LayerShape,
    PackedBatch,
    Span,
    Stored,
)
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.tree_mask import tree_after_chain
from hf_slospec.tree.tree import TokenTree

TREES = [
    TokenTree.root_only(3),
    TokenTree(
        np.arange(6), np.array([-1, 0, 0, 1, 1, 3]), np.array([0, 1, 1, 2, 2, 3]), np.ones(6)
    ),
    TokenTree(np.arange(4), np.array([-1, 0, 1, 2]), np.array([0, 1, 2, 3]), np.ones(4)),
]

# Rules that a kernel is tried with, and its errors relative to the largest value.
OPTIONS = {
    "plain": {},
    "window": dict(window=6, softcap=2.0),
    "narrow": dict(window=1),
    "sinks": dict(has_sinks=True),
    "chunks": dict(chunk=4, has_sinks=True),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Token:
    """What one token of a row sees."""

    position: int
    slots: list[int]
    positions: list[int]  # what is in the slots has these


@dataclass(eq=False)
class Case:
    """A row, its K and V, and what each of its tokens sees."""

    row: PackedBatch
    keys: torch.Tensor  # [num_slots, num_kv_heads, key_dim]
    values: torch.Tensor  # [num_slots, num_kv_heads, value_dim]
    tokens: list[Token]

    def expected(
        self,
        query,  # [num_heads, num_tokens, key_dim]
        rules,
    ):
        """-> [num_tokens, num_heads, value_dim] f32"""
        scaling, window, softcap, sinks, chunk, bias = rules
        groups = len(query) // self.keys.shape[1]
        keys, values = (kv.float().repeat_interleave(groups, 1) for kv in (self.keys, self.values))
        outs = []
        for index, token in enumerate(self.tokens):
            seen = [
                slot
                for slot, position in zip(token.slots, token.positions, strict=True)
                if (window is None or token.position - position < window)
                and (chunk is None or token.position // chunk == position // chunk)
            ]
            scores = torch.einsum("khd,hd->hk", keys[seen], query[:, index].float()) * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if bias is not None:
                distances = [
                    token.position - dict(zip(token.slots, token.positions, strict=True))[slot]
                    for slot in seen
                ]
                scores = (
                    scores + bias[:, [min(distance, bias.shape[1] - 1) for distance in distances]]
                )
            extra = scores.new_empty(len(query), 0) if sinks is None else sinks.float()[:, None]
            weights = torch.cat((scores, extra), 1).softmax(1)[:, : len(seen)]
            outs.append(torch.einsum("hk,khd->hd", weights, values[seen]))
        return torch.stack(outs)


def case(
    spans,  # tokens committed, tokens of a chain, the tree at its end
    num_kv_heads,
    key_dim,
    value_dim,
    dtype=torch.float32,
    device="cpu",
    in_order=True,
):
    """Spans in a pool with free slots between them, filled at random; ``in_order``: as in the row."""
    shape = LayerShape(
        *(Stored(num_kv_heads, dim, dtype, torch.device(device)) for dim in (key_dim, value_dim))
    )
    capacities = [
        prefix_len + chain_len + tree.num_nodes + 3 for prefix_len, chain_len, tree in spans
    ]
    pool = KVPool([shape], sum(capacities))
    pool.keys[0].normal_()
    pool.values[0].normal_()
    order = range(len(spans)) if in_order else reversed(range(len(spans)))
    sequences = {index: CachedSequence() for index in order}
    for index, sequence in sequences.items():
        pool.place(sequence, capacities[index])
    own_spans = []
    tokens = []
    for index, (prefix_len, chain_len, tree) in enumerate(spans):
        sequence = sequences[index]
        sequence.length = prefix_len
        mask, offsets = tree_after_chain(chain_len, tree)
        begin = len(tokens)
        positions = prefix_len + offsets
        for row, position in enumerate(positions.tolist()):
            fresh = np.flatnonzero(mask[row])
            slots = [sequence.start + slot for slot in [*range(prefix_len), *(prefix_len + fresh)]]
            tokens.append(Token(position, slots, [*range(prefix_len), *positions[fresh].tolist()]))
        own_spans.append(
            Span(
                sequence,
                begin,
                len(tokens),
                torch.from_numpy(mask).to(device),
                torch.from_numpy(positions).to(device),
                is_chain=tree.num_nodes == 1,
            )
        )
    return Case(
        PackedBatch(own_spans, [span.visible for span in own_spans]),
        pool.keys[0],
        pool.values[0],
        tokens,
    )


ROOT, BRANCHING, CHAIN = TREES
SPANS = [
    (prefix_len, chain_len, tree) for prefix_len in (0, 7) for chain_len in (1, 3) for tree in TREES
]
ROWS = {
    "every-kind": SPANS,
    "long-chains-beside-trees": [
        (5, 70, ROOT),
        (0, 66, ROOT),
        *SPANS,
    ],  # as prompts are fed beside decoding
    "long-chains-only": [(5, 70, ROOT), (0, 66, ROOT)],
    "single-tokens": [(prefix_len, 1, ROOT) for prefix_len in (0, 1, 30)],
    "nothing-committed": [(0, 3, BRANCHING), (0, 1, CHAIN)],
}
