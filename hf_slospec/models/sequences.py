"""The KV storage of one model's running requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.models.kv_pool import CachedSequence, KVPool
from hf_slospec.models.packed import Fresh, PackedModel

FIRST_ROOM = 512  # new tokens a request has room for at first
CHUNK = 512  # longer stretches of uncached tokens are fed in pieces: masks grow with the square of a piece


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


class Sequences:
    """A pool for the given requests, and each request's range of it. It grows with their texts."""

    def __init__(self, packed: PackedModel, requests: Sequence[Request], max_nodes: int):
        """``max_nodes`` bounds the tree nodes of one request that are staged at a time."""
        self.packed, self.max_nodes = packed, max_nodes
        self._embeds: dict[Request, torch.Tensor] = {}
        capacities = [self._capacity(request, FIRST_ROOM) for request in requests]
        self.pool: KVPool = packed.new_pool(sum(capacities))
        self._by_request: dict[Request, CachedSequence] = {
            request: self.pool.allocate(capacity) for request, capacity in zip(requests, capacities, strict=True)
        }

    def _capacity(self, request: Request, room: int) -> int:
        """Slots for the text so far, ``room`` more tokens of it if it may get so long, and what a step stages."""
        return len(request.tokens) + min(request.num_left, room) + self.max_nodes

    def reserve(self, requests: Sequence[Request]) -> None:
        """Make room for one more step of these requests, while nothing is staged.

        ``max_new_tokens`` is often far more than what a text comes to, so a request starts with little. When one has
        used up its room, all get as much again as their texts are long, and what is cached moves to a larger pool.
        """
        if all(self.of(request).capacity >= self._capacity(request, 0) for request in requests):
            return
        self._grow([self._capacity(request, max(len(request.tokens), FIRST_ROOM)) for request in self._by_request])

    def reserve_for(self, request: Request, length: int) -> None:
        """Make room for a text of this length of one request."""
        if self.of(request).capacity < length:
            self._grow([length if r is request else own.capacity for r, own in self._by_request.items()])

    def _grow(self, capacities: Sequence[int]) -> None:
        old, ranges = self.pool, dict(self._by_request)
        self.pool = self.packed.new_pool(sum(capacities))
        for (request, before), capacity in zip(ranges.items(), capacities, strict=True):
            now = self._by_request[request] = self.pool.allocate(capacity)
            now.length = before.length
            self.pool.copy_from(old, before, now)

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
        causal = np.tri(len(tokens), dtype=np.bool_)
        return self._fresh(request, tokens, np.arange(len(tokens)), causal)

    def chain_and_tree(self, request: Request, chain: Sequence[int], tree: TokenTree) -> Fresh:
        """Committed tokens that follow the cached ones and end with the root, then the tree's other nodes."""
        mask, offsets = tree_after_chain(len(chain), tree)
        return self._fresh(request, [*chain, *tree.tokens[1:]], offsets, mask)

    def _fresh(self, request: Request, tokens: Sequence[int], offsets: np.ndarray, mask: np.ndarray) -> Fresh:
        device, sequence = self.packed.device, self.of(request)
        embeds = self._embeds.get(request)
        if embeds is not None:  # [num_tokens, hidden] while the prompt is fed, nothing after that
            embeds = embeds[sequence.length : sequence.length + len(tokens)]
            assert len(embeds) in (0, len(tokens)), "a prompt given as embeddings is fed before anything else"
        return Fresh(
            sequence,
            self.packed.known(torch.tensor(tokens, device=device)),
            self.packed.inside(torch.from_numpy(sequence.length + offsets).to(device)),
            torch.from_numpy(mask).to(device),
            embeds if embeds is not None and len(embeds) else None,
        )

    def give_embeds(self, request: Request, embeds: torch.Tensor) -> None:
        """Feed these instead of the embeddings of the prompt's tokens.  [prompt_len, hidden]"""
        self._embeds[request] = embeds

    def load(self, request: Request, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Take K and V of the first ``length`` tokens from elsewhere.

        Args:
            layers: K and V of each, [num_heads, num_given, dim]: of all the tokens, or of the last ones of them where
                a sliding window has dropped the others.
        """
        sequence = self.of(request)
        end = sequence.start + length
        for *mine, theirs in zip(self.pool.keys, self.pool.values, layers, strict=True):
            for stored, given in zip(mine, theirs, strict=True):
                stored[end - given.shape[1] : end] = given.transpose(0, 1).to(stored)
        sequence.length = length

    def read(self, request: Request) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of the request's cached tokens, each layer's [num_heads, length, dim]."""
        sequence = self.of(request)
        own = slice(sequence.start, sequence.start + sequence.length)
        pairs = zip(self.pool.keys, self.pool.values, strict=True)
        return [(key[own].transpose(0, 1), value[own].transpose(0, 1)) for key, value in pairs]
