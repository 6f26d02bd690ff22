"""The target model behind the engine's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Chooser
from hf_slospec.engine.request import Request
from hf_slospec.models.packed import Fresh, PackedModel
from hf_slospec.models.sequences import Sequences


class Sampler(Protocol):
    """Chooses tokens exactly as plain decoding would."""

    kind: Literal["greedy", "sampled"]  # runs with samplers of one kind accept drafts alike

    def choosers(
        self, requests: Sequence[Request], logits: torch.Tensor, num_nodes: Sequence[int]
    ) -> Sequence[Chooser]:
        """One chooser per request.

        ``logits`` [sum(num_nodes), vocab], in the model's dtype, holds each request's nodes in turn, root first.
        """


def tree_after_chain(chain_len: int, tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Mask and position offsets of a chain of committed tokens that ends with the root, followed by the tree's nodes.

    Returns:
        mask [num_tokens, num_tokens] bool and offsets [num_tokens] int64 from the chain's first token,
        with num_tokens = chain_len + tree.num_nodes - 1.
    """
    num_tokens = chain_len + tree.num_nodes - 1
    mask = np.tri(num_tokens, dtype=np.bool_)
    mask[chain_len:, chain_len:] = tree.ancestor_mask()[1:, 1:]
    offsets = np.concatenate((np.arange(chain_len), chain_len - 1 + tree.depths[1:]))
    return mask, offsets


class PackedTarget:
    """Verifies draft trees of many requests in one packed forward; commits accepted nodes only."""

    def __init__(self, packed: PackedModel, requests: Sequence[Request], max_nodes: int, sampler: Sampler):
        """``max_nodes`` bounds the nodes of one request's draft tree, its root not counted."""
        self.sampler = sampler
        self.sequences = Sequences(packed, requests, max_nodes)

    def verify(self, requests: Sequence[Request], trees: Sequence[TokenTree]) -> Sequence[Chooser]:
        device = self.sequences.packed.device
        parts, logit_rows, begin = [], [], 0
        for request, tree in zip(requests, trees, strict=True):
            chain = self.sequences.uncached_tail(request)  # the last one is the root
            sequence = self.sequences.of(request)
            mask, offsets = tree_after_chain(len(chain), tree)
            parts.append(
                Fresh(
                    sequence,
                    torch.tensor([*chain, *tree.tokens[1:]], device=device),
                    torch.from_numpy(sequence.length + offsets).to(device),
                    torch.from_numpy(mask).to(device),
                )
            )
            logit_rows.append(np.arange(begin + len(chain) - 1, begin + len(offsets)))
            begin += len(offsets)
        rows = torch.from_numpy(np.concatenate(logit_rows)).to(device)
        logits = self.sequences.forward(parts, rows)
        return self.sampler.choosers(requests, logits, [tree.num_nodes for tree in trees])

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
        self.sequences.release(request)
