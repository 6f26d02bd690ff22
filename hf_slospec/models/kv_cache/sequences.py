"""The KV storage of one model's running requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.kv_cache.pool import CachedSequence, KVPool
from hf_slospec.models.packed import PackedModel

FIRST_ROOM = 512  # new tokens a request has room for at first


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
    """The requests that have K/V in one model, each with its range of a pool that grows with them."""

    def __init__(self, packed: PackedModel, max_nodes: int, max_slots: int | None = None, is_kept: bool = False):
        """``max_nodes`` bounds the tree nodes of one request that are staged at a time, ``max_slots`` the pool.

        With ``is_kept``, an earlier call's pool is used again, and left to the next by ``close``.
        """
        self.packed, self.max_nodes, self.max_slots = packed, max_nodes, max_slots
        self.pool: KVPool = packed.kept_pool() if is_kept else packed.new_pool(0)
        self._by_request: dict[Request, CachedSequence] = {}
        self._embeds: dict[Request, torch.Tensor] = {}

    def of(self, request: Request) -> CachedSequence:
        return self._by_request[request]

    def num_cached(self, request: Request) -> int:
        """Tokens of the request whose K/V is here."""
        return self._by_request[request].length if request in self._by_request else 0

    def reserve(self, requests: Sequence[Request]) -> None:
        """Make room for one more step of these requests, known or new, while nothing is staged.

        ``max_new_tokens`` is often far more than what a text comes to, so a request starts with little. When it has
        used up its room, it gets as much again as its text is long.

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
        """Slots for the text so far, ``room`` more tokens of it if it may get so long, and what a step stages."""
        return len(request.tokens) + min(request.num_left, room) + self.max_nodes

    def _provide(self, capacities: dict[Request, int]) -> None:
        """Give requests ranges of these capacities, what they have cached moved there."""
        wanted = {request: own.capacity for request, own in self._by_request.items()} | capacities
        if sum(capacities.values()) > self.pool.largest_free:
            if sum(wanted.values()) > self.pool.num_slots:
                self._enlarge(wanted)
                return
            self.pool.repack({own: wanted[request] for request, own in self._by_request.items()})
        for request, capacity in capacities.items():
            before = self._by_request.get(request)
            if before is None or before.capacity < capacity:
                now = self._by_request[request] = self.pool.allocate(capacity)
                if before is not None:
                    now.length = before.length
                    self.pool.copy_from(self.pool, before, now)
                    self.pool.release(before)

    def _enlarge(self, wanted: dict[Request, int]) -> None:
        """Move everything to a larger pool."""
        needed, limit = sum(wanted.values()), self.max_slots
        if limit is not None and needed > limit:
            raise MemoryError(f"{needed} KV slots are needed, and there may be {limit}")
        if not self._by_request:
            self.pool = self.packed.new_pool(0)  # its memory is free before more is taken
        doubled = 2 * self.pool.num_slots
        pool = self.packed.new_pool(max(needed, doubled if limit is None else min(doubled, limit)))
        moved = {request: pool.allocate(capacity) for request, capacity in wanted.items()}
        for request, before in self._by_request.items():
            moved[request].length = before.length
            pool.copy_from(self.pool, before, moved[request])
        self.pool, self._by_request = pool, moved

    def release(self, request: Request) -> None:
        self._embeds.pop(request, None)
        if (sequence := self._by_request.pop(request, None)) is not None:
            self.pool.release(sequence)

    def close(self) -> None:
        """All requests are done, and their K/V is wanted no more; the next call may have the pool."""
        for request in list(self._by_request):
            self.release(request)
        self.packed.keep(self.pool)
        self.pool = self.packed.new_pool(0)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless only some of these hold slots, and all other slots are free."""
        assert self._by_request.keys() <= set(requests), "a request that is not running holds K/V"
        held = sum(sequence.capacity for sequence in self._by_request.values())
        assert held + self.pool.num_free == self.pool.num_slots, "KV slots are lost, or free and held at once"

    def forward(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> torch.Tensor:
        return self.packed.forward(self.pool, parts, logit_rows)

    def uncached(self, request: Request) -> list[int]:
        """The request's committed tokens without K/V."""
        return request.tokens[self.of(request).length :]

    def feed(self, request: Request, num_tokens: int) -> None:
        """Cache this many more of the request's tokens, and nothing else."""
        part = self.chain(request, self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64))
        self.of(request).length += num_tokens

    def chain(self, request: Request, tokens: Sequence[int]) -> NewTokens:
        """Tokens that follow the request's cached ones, each seeing those before it."""
        causal = np.tri(len(tokens), dtype=np.bool_)
        return self._fresh(request, tokens, np.arange(len(tokens)), causal, is_chain=True)

    def chain_and_tree(self, request: Request, chain: Sequence[int], tree: TokenTree) -> NewTokens:
        """Committed tokens that follow the cached ones and end with the root, then the tree's other nodes."""
        mask, offsets = tree_after_chain(len(chain), tree)
        return self._fresh(request, [*chain, *tree.tokens[1:]], offsets, mask)

    def _fresh(
        self, request: Request, tokens: Sequence[int], offsets: np.ndarray, mask: np.ndarray, is_chain: bool = False
    ) -> NewTokens:
        sequence = self.of(request)
        embeds = self._embeds.get(request)
        if embeds is not None:  # [num_tokens, hidden] while the prompt is fed, nothing after that
            embeds = embeds[sequence.length : sequence.length + len(tokens)]
            assert len(embeds) in (0, len(tokens)), "a prompt given as embeddings is fed before anything else"
        return NewTokens(
            sequence,
            self.packed.known(torch.tensor(tokens)),
            self.packed.inside(torch.from_numpy(sequence.length + offsets)),
            torch.from_numpy(mask),
            embeds if embeds is not None and len(embeds) else None,
            is_chain,
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
