"""The target model as the engine uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Chooser, Chunk
from hf_slospec.engine.request import Request
from hf_slospec.models.kv_cache.request_sequences import RequestSequences
from hf_slospec.models.memory import as_memory_error
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.sampling import PendingChoices


class Sampler(Protocol):
    """Chooser of tokens that are exactly those of plain decoding."""

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        """Return the tokens that the device chooses, and a function that makes one chooser per request of them.

        ``logits`` [num_nodes of all trees, vocab], in the model's dtype, holds each tree's nodes in turn, root first.
        """


class PackedTarget:
    """Verifier of many requests' draft trees in one packed forward, of which only accepted nodes are committed."""

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        sampler: Sampler,
        max_slots: int | None = None,
        max_kept: float = 0,
        holds_finished: bool = False,
    ):
        """``max_nodes`` bounds the nodes of one request's draft tree, its root not counted.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`. With ``holds_finished``, K/V of finished
        requests stays readable in ``sequences`` until ``close``.
        """
        self.sampler, self.holds_finished = sampler, holds_finished
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        with as_memory_error():
            return self._verify(requests, trees, chunks)

    def _verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk]
    ) -> Sequence[Chooser]:
        self.sequences.reserve([*requests, *(chunk.request for chunk in chunks)])
        parts, logit_rows, begin = [], [], 0
        for request, tree in zip(requests, trees, strict=True):
            chain = self.sequences.uncached(request)  # the last one is the root
            parts.append(self.sequences.chain_and_tree(request, chain, tree))
            logit_rows.append(begin + len(chain) - 1 + np.arange(tree.num_nodes))
            begin += len(chain) + tree.num_nodes - 1
        for chunk in chunks:
            tokens = self.sequences.uncached(chunk.request)[: chunk.num_tokens]
            parts.append(self.sequences.chain(chunk.request, tokens))
        wanted = np.concatenate(logit_rows) if logit_rows else np.empty(0, np.int64)
        logits = self.sequences.forward(parts, torch.from_numpy(wanted))
        choices, choosers = self.sampler.choose(requests, logits, trees)
        return choosers(choices.tolist())  # the host waits for the device here, and where processors read the text

    def commit(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], chunks: Sequence[Chunk] = ()
    ) -> None:
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
        for chunk in chunks:
            self.sequences.of(chunk.request).length += chunk.num_tokens
        self.sequences.cache.pool.move(source, destination)

    def reuse(self, request: Request) -> int:
        return self.sequences.reuse(request)

    def num_reusable(self, request: Request) -> int:
        return self.sequences.num_reusable(request)

    @property
    def num_kept(self) -> int:
        return self.sequences.num_kept

    def release(self, request: Request) -> None:
        if not self.holds_finished:
            self.sequences.release(request)

    def close(self) -> None:
        """Release all requests and the model's K/V cache."""
        self.sequences.close()

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert self.sequences.num_cached(request) == request.num_cached, "num_cached is not what has K/V"
        if not self.holds_finished:
            self.sequences.check(requests)
