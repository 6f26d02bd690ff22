"""Requests with K/V in one pool and forwards of trees behind them, for the tests of captured
forwards.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_slospec.model.sequences import Sequences
from hf_slospec.model.tree_mask import chain_and_tree
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree
from tests.support.packed import packed_model

CPU = torch.device("cpu")
TREES = [(-1, 0, 0, 1, 3), (-1,), (-1, 0, 1)]


class Bench:
    """Requests with K/V in one pool, and forwards of trees behind them."""

    def __init__(
        self,
        model,
        num_cached=(11, 30, 7),
        attention="flash",
        **options,
    ):
        self.packed = packed_model(model, attention, **options)
        draw = torch.Generator().manual_seed(0)
        self.requests = [
            Request(i, RequestParams(torch.randint(3, 101, (n + 1,), generator=draw).tolist(), 30))
            for i, n in enumerate(num_cached)
        ]
        self.sequences = Sequences(self.packed, max_nodes=8)
        self.sequences.reserve(self.requests)
        for request in self.requests:
            self.sequences.prefill(request, request.prompt_len - 1)

    @property
    def graphs(self):
        return self.packed.path("cuda_graphs").on(self.sequences.cache.pool)

    def parts(self):
        trees = [tree(request, TREES[request.index % 3]) for request in self.requests]
        pairs = zip(self.requests, trees, strict=True)
        return [
            chain_and_tree(self.packed, self.sequences.of(r), self.sequences.uncached(r), tree)
            for r, tree in pairs
        ]

    def verify(self):
        parts = self.parts()
        return self.sequences.forward(
            parts, torch.arange(sum(len(part.input_ids) for part in parts))
        ).logits

    def grow(self, num_tokens):
        for request in self.requests:
            request.tokens += [(7 * len(request.tokens)) % 97 + 3] * num_tokens
            self.sequences.prefill(request, num_tokens)


def tree(request, parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = [request.tokens[-1], *range(5, 4 + len(parents))]
    return TokenTree(np.array(tokens), np.array(parents), np.array(depths), 0.5 ** np.array(depths))
