"""The KV storage of one model's running requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_slospec.engine.request import Request
from hf_slospec.models.kv_pool import CachedSequence, KVPool
from hf_slospec.models.packed import Fresh, PackedModel

CHUNK = 512  # longer stretches of uncached tokens are fed in pieces: masks grow with the square of a piece


class Sequences:
    """A pool sized for the given requests, and each request's range of it."""

    def __init__(self, packed: PackedModel, requests: Sequence[Request], max_nodes: int):
        """``max_nodes`` bounds the tree nodes of one request that are staged at a time."""
        capacities = [request.prompt_len + request.max_new_tokens + max_nodes for request in requests]
        self.packed = packed
        self.pool: KVPool = packed.new_pool(sum(capacities))
        self._by_request: dict[Request, CachedSequence] = {
            request: self.pool.allocate(capacity) for request, capacity in zip(requests, capacities, strict=True)
        }

    def of(self, request: Request) -> CachedSequence:
        return self._by_request[request]

    def release(self, request: Request) -> None:
        self.pool.release(self._by_request.pop(request))

    def forward(self, parts: Sequence[Fresh], logit_rows: torch.Tensor) -> torch.Tensor:
        return self.packed.forward(self.pool, parts, logit_rows)

    def uncached_tail(self, request: Request) -> list[int]:
        """The request's committed tokens without K/V, the last :data:`CHUNK` at most; earlier ones are fed first."""
        sequence = self.of(request)
        while len(request.tokens) - sequence.length > CHUNK:
            piece = request.tokens[sequence.length : sequence.length + CHUNK]
            self.forward([self.chain(request, piece)], torch.empty(0, dtype=torch.int64, device=self.packed.device))
            sequence.length += CHUNK
        return request.tokens[sequence.length :]

    def chain(self, request: Request, tokens: Sequence[int]) -> Fresh:
        """Tokens that follow the request's cached ones, each seeing those before it."""
        device, sequence = self.packed.device, self.of(request)
        positions = self.packed.inside(sequence.length + torch.arange(len(tokens), device=device))
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=device).tril()
        return Fresh(sequence, torch.tensor(tokens, device=device), positions, causal)
