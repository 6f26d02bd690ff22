"""The target model behind the engine's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Chooser
from hf_slospec.engine.request import Request
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.sequences import Sequences


class Sampler(Protocol):
    """Chooses tokens exactly as plain decoding would."""

    kind: Literal["greedy", "sampled"]  # runs with samplers of one kind accept drafts alike

    def choosers(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> Sequence[Chooser]:
        """One chooser per request.

        ``logits`` [num_nodes of all trees, vocab], in the model's dtype, holds each tree's nodes in turn, root first.
        """


class PackedTarget:
    """Verifies draft trees of many requests in one packed forward; commits accepted nodes only."""

    def __init__(
        self,
        packed: PackedModel,
        requests: Sequence[Request],
        max_nodes: int,
        sampler: Sampler,
        holds_finished: bool = False,
    ):
        """``max_nodes`` bounds the nodes of one request's draft tree, its root not counted.

        With ``holds_finished``, K/V of finished requests stay readable in ``sequences``.
        """
        self.sampler, self.holds_finished = sampler, holds_finished
        self.sequences = Sequences(packed, requests, max_nodes)

    def verify(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Sequence[Chooser]:
        device = self.sequences.packed.device
        self.sequences.reserve(requests)
        parts, logit_rows, begin = [], [], 0
        for request, tree in zip(requests, trees, strict=True):
            chain = self.sequences.uncached_tail(request)  # the last one is the root
            parts.append(self.sequences.chain_and_tree(request, chain, tree))
            logit_rows.append(begin + len(chain) - 1 + np.arange(tree.num_nodes))
            begin += len(chain) + tree.num_nodes - 1
        rows = torch.from_numpy(np.concatenate(logit_rows)).to(device)
        logits = self.sequences.forward(parts, rows)
        return self.sampler.choosers(requests, logits, trees)

    def commit(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]]) -> None:
        source, destination = list[int](), list[int]()
        for request, nodes in zip(requests, accepted, strict=True):
            sequence = self.sequences.of(request)
            chain_len = len(request.tokens) - len(nodes) - 1 - sequence.length
            first_node = sequence.start + sequence.length + chain_len
            for place, node in enumerate(nodes):
                if first_node + node - 1 != first_node + place:
                    source.append(first_node + node - 1)
                    destination.append(first_node + place)
            sequence.length += chain_len + len(nodes)
        self.sequences.pool.move(source, destination)

    def release(self, request: Request) -> None:
        if not self.holds_finished:
            self.sequences.release(request)
