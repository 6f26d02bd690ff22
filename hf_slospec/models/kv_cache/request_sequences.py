"""Requests of one engine that have K/V in a model's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.kv_cache.cache import KVCache
from hf_slospec.models.kv_cache.pool import CachedSequence
from hf_slospec.models.new_tokens import chain, chain_and_tree
from hf_slospec.models.packed import PackedModel

FIRST_ROOM = 512  # new tokens that a request has room for at first


class RequestSequences:
    """The requests of one engine that have K/V in a model's cache, which other engines may share.

    All methods but the constructor must be called with the model's lock held.
    """

    def __init__(self, packed: PackedModel, max_nodes: int, max_slots: int | None = None):
        """``max_nodes`` bounds the tree nodes of one request staged at a time, ``max_slots`` the slots of them all."""
        self.packed, self.max_nodes, self.max_slots = packed, max_nodes, max_slots
        self._cache: KVCache | None = None
        self._by_request: dict[Request, CachedSequence] = {}
        self._embeds: dict[Request, torch.Tensor] = {}

    @property
    def cache(self) -> KVCache:
        """The model's cache, referred to from the first use until ``close``."""
        if self._cache is None:
            self._cache = self.packed.kv_cache
        return self._cache

    def of(self, request: Request) -> CachedSequence:
        """Return the sequence of a request, for which room was reserved."""
        return self._by_request[request]

    def num_cached(self, request: Request) -> int:
        """Return the number of the request's tokens whose K/V is cached."""
        return self._by_request[request].length if request in self._by_request else 0

    def reserve(self, requests: Sequence[Request]) -> None:
        """Make room for one more step of these requests, known or new, while nothing is staged.

        ``max_new_tokens`` is often far more than a text comes to, so a request starts with little room. Once it is
        used up, the request gets as much again as its text is long.

        Raises:
            MemoryError: that would be more than ``max_slots``, or than there is memory for. Nothing has changed.
        """
        self._provide(
            {
                request: self._capacity(request, max(len(request.tokens), FIRST_ROOM))
                for request in requests
                if self._room_of(request) < self._capacity(request, 0)
            }
        )

    def reserve_for(self, request: Request, length: int) -> None:
        """Make room for a text of this length of one request."""
        if self._room_of(request) < length:
            self._provide({request: length})

    def _room_of(self, request: Request) -> int:
        return self._by_request[request].capacity if request in self._by_request else 0

    def _capacity(self, request: Request, room: int) -> int:
        """Return the slots for the text, ``room`` more tokens of it if it may get so long, and one step's nodes."""
        return len(request.tokens) + min(request.num_left, room) + self.max_nodes

    def _provide(self, capacities: dict[Request, int]) -> None:
        """Give requests ranges of these capacities, and move there what they have cached."""
        if not capacities:
            return
        limit, held = self.max_slots, {request: own.capacity for request, own in self._by_request.items()}
        if limit is not None:
            if (needed := sum((held | capacities).values())) > limit:
                raise MemoryError(f"{needed} KV slots are needed, and there may be {limit}")
            limit += self.cache.num_held - sum(held.values())  # sequences of others in the same pool
        sequences = {request: self._by_request.get(request) or CachedSequence() for request in capacities}
        self.cache.reserve({sequences[request]: slots for request, slots in capacities.items()}, limit)
        self._by_request |= sequences

    def release(self, request: Request) -> None:
        """Drop the K/V of a request, if it has any."""
        self._embeds.pop(request, None)
        if (sequence := self._by_request.pop(request, None)) is not None:
            self.cache.release(sequence)

    def close(self) -> None:
        """Release all requests and the cache: after its last user, its memory is freed or kept for its CUDA graphs."""
        for request in list(self._by_request):
            self.release(request)
        if self._cache is not None:
            self.packed.keep_if_captured(self._cache)
            self._cache = None

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless only some of these requests hold slots, none of which another sequence has."""
        assert self._by_request.keys() <= set(requests), "a request that is not running holds K/V"
        assert set(self._by_request.values()) <= set(self.cache.pool.sequences), "a request has lost its KV slots"
        self.cache.pool.check()

    def forward(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> torch.Tensor:
        """Forward new tokens of requests; see :meth:`PackedModel.forward`."""
        return self.packed.forward(self.cache.pool, parts, logit_rows)

    def uncached(self, request: Request) -> list[int]:
        """Return the request's committed tokens without K/V."""
        return request.tokens[self.of(request).length :]

    def prefill(self, request: Request, num_tokens: int) -> None:
        """Cache this many more of the request's tokens."""
        part = self.chain(request, self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64))
        self.of(request).length += num_tokens

    def chain(self, request: Request, tokens: Sequence[int]) -> NewTokens:
        """Return tokens that follow the request's cached ones, each seeing those before it."""
        return chain(self.packed, self.of(request), tokens, self._embeds.get(request))

    def chain_and_tree(self, request: Request, tokens: Sequence[int], tree: TokenTree) -> NewTokens:
        """Return tokens that follow the cached ones and end with the root, then the tree's other nodes."""
        return chain_and_tree(self.packed, self.of(request), tokens, tree, self._embeds.get(request))

    def give_embeds(self, request: Request, embeds: torch.Tensor) -> None:
        """Use these in place of the embeddings of the prompt's tokens.  [prompt_len, hidden]"""
        self._embeds[request] = embeds

    def load(self, request: Request, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Copy in the K/V of the request's first ``length`` tokens, see :meth:`KVCache.load`."""
        self.cache.load(self.of(request), layers, length)

    def read(self, request: Request) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of the K/V of the request's cached tokens, each layer's [num_heads, length, dim]."""
        return self.cache.read(self.of(request))
