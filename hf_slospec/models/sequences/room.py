"""Room in a model's K/V cache for the requests of one engine, and for texts that are kept beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch

from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.kv_cache.cache import KVCache
from hf_slospec.models.packed.model import PackedModel
from hf_slospec.models.sequences.kept_texts import KeptTexts

FIRST_ROOM = 512  # new tokens that a request has room for at first
KEPT_STATES = 16  # texts that are kept at most where layers have states: one is as large as K/V of hundreds of tokens


class RequestText(Hashable, Protocol):
    """A request, or its text in the tokens of a draft with another tokenizer."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed tokens."""

    @property
    def num_left(self) -> int:
        """Tokens that may still be added, as far as that is known."""

    @property
    def cache_salt(self) -> str:
        """Name of the requests that it may share K/V with."""

    @property
    def error(self) -> BaseException | None:
        """Error that ended the request."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_padding(self) -> int:
        """Tokens by which the prompt is shorter than the longest one of its batch."""


class SequenceRoom:
    """Slots of the requests of one engine in a model's K/V cache, which other engines may share.

    Kept texts hold the slots that are left, and lose them, the least recently used text first, to requests.

    All methods but the constructor must be called with the model's lock held.
    """

    def __init__(self, packed: PackedModel, max_nodes: int, max_slots: int | None = None, max_kept: float = 0):
        """Begin without requests.

        Args:
            max_nodes: tree nodes of one request staged at a time, at most.
            max_slots: slots of all requests and kept texts, at most.
            max_kept: tokens of kept texts, at most; 0 keeps none, and requests share nothing.
        """
        self.packed, self.max_nodes, self.max_slots, self.max_kept = packed, max_nodes, max_slots, max_kept
        self._cache: KVCache | None = None
        self._by_request: dict[RequestText, CachedSequence] = {}
        self._embeds: dict[RequestText, torch.Tensor] = {}
        self._states: dict[RequestText, int] = {}  # fingerprint state when their first tokens were cached
        self._kept, self._kept_state = KeptTexts(), 0

    @property
    def cache(self) -> KVCache:
        """The model's cache, referred to from the first use until ``close``."""
        if self._cache is None:
            self._cache = self.packed.kv_cache
        return self._cache

    def of(self, request: RequestText) -> CachedSequence:
        """Return the sequence of a request, for which room was reserved."""
        return self._by_request[request]

    def num_cached(self, request: RequestText) -> int:
        """Return the number of the request's tokens whose K/V is cached."""
        return self._by_request[request].length if request in self._by_request else 0

    @property
    def num_held(self) -> int:
        """Slots of requests."""
        return sum(own.capacity for own in self._by_request.values())

    @property
    def num_kept(self) -> int:
        """Tokens of requests that are over whose K/V is kept."""
        return self._kept.num_tokens

    def reserve(self, requests: Sequence[RequestText], num_nodes: Sequence[int] | None = None) -> None:
        """Make room for one more step of these requests, known or new, while nothing is staged.

        ``max_new_tokens`` is often far more than a text comes to, so a request starts with little room. Once it is
        used up, the request gets as much again as its text is long. Where slots are short, nodes get what this step's
        trees need.

        Args:
            num_nodes: nodes of each request's tree, its root not counted; None: as many as it may have.

        Raises:
            MemoryError: the step needs more than ``max_slots``, or than there is memory for. Nothing has changed.
        """
        sizes = [self.max_nodes] * len(requests) if num_nodes is None else num_nodes
        needed = {request: len(request.tokens) + size for request, size in zip(requests, sizes, strict=True)}
        try:
            self._provide({request: self._roomy_capacity(request) for request in self._short(needed)})
        except MemoryError:
            self._take_back_room_for_nodes()
            short = self._short(needed)  # requests that had room before may have lost it
            texts = {request: self._roomy_capacity(request) - self.max_nodes for request in short}
            self._provide({request: max(texts[request], slots) for request, slots in short.items()})

    def reserve_for(self, request: RequestText, length: int) -> None:
        """Make room for a text of this length of one request."""
        if self._room_of(request) < length:
            self._provide({request: length})

    def limit(self, max_slots: int) -> None:
        """Set the slots of all requests and kept texts, and free the memory of those beyond; requests keep theirs."""
        self.max_slots = max_slots
        if self.num_held > max_slots:
            self._take_back_room_for_nodes()
        self._keep_at_most(max(max_slots - self.num_held, 0))
        others = self.cache.num_held - self.num_held - self._kept.num_tokens  # in the same pool
        with contextlib.suppress(MemoryError), as_memory_error():  # for the copy; then it is freed with the cache
            self.cache.shrink(max_slots + others)

    def _short(self, needed: Mapping[RequestText, int]) -> dict[RequestText, int]:
        """Return the requests that have fewer slots than needed, with what they need."""
        return {request: slots for request, slots in needed.items() if self._room_of(request) < slots}

    def _take_back_room_for_nodes(self) -> None:
        """Leave all requests the slots of their texts at their longest, and what they have cached."""
        for request, own in self._by_request.items():
            longest = max(len(request.tokens) + request.num_left, own.length)
            own.capacity = min(own.capacity, longest)

    def _room_of(self, request: RequestText) -> int:
        return self._by_request[request].capacity if request in self._by_request else 0

    def _roomy_capacity(self, request: RequestText) -> int:
        return self._capacity(request, max(len(request.tokens), FIRST_ROOM))

    def _capacity(self, request: RequestText, room: int) -> int:
        """Return the slots for the text, ``room`` more tokens of it if it may get so long, and one step's nodes."""
        return len(request.tokens) + min(request.num_left, room) + self.max_nodes

    def _provide(self, capacities: dict[RequestText, int]) -> None:
        """Give requests ranges of these capacities, and move there what they have cached."""
        if not capacities:
            return
        limit, held = self.max_slots, {request: own.capacity for request, own in self._by_request.items()}
        if limit is not None:
            if (needed := sum((held | capacities).values())) > limit:
                raise MemoryError(f"{needed} KV slots are needed, and there may be {limit}")
            self._keep_at_most(limit - needed)
            # Sequences of others in the same pool do not count.
            limit += self.cache.num_held - sum(held.values()) - self._kept.num_tokens
        sequences = {request: self._by_request.get(request) or CachedSequence() for request in capacities}
        slots = {sequences[request]: slots for request, slots in capacities.items()}
        try:
            self._reserve(slots, limit)
        except MemoryError:
            if not len(self._kept):
                raise
            self._keep_at_most(0)
            self._reserve(slots, limit)
        self._by_request |= sequences
        for request, sequence in sequences.items():
            sequence.prompt_len, sequence.num_padding = request.prompt_len, request.num_padding
            self._states.setdefault(request, self.packed.fingerprint.state)

    def _reserve(self, slots: dict[CachedSequence, int], limit: int | None) -> None:
        with as_memory_error():
            self.cache.reserve(slots, limit)

    def _keep_at_most(self, num_tokens: float) -> None:
        """Drop the least recently used texts until those left have so many tokens at most."""
        most = KEPT_STATES if self.packed.has_states else len(self._kept)
        for text in self._kept.texts():
            if self._kept.num_tokens <= num_tokens and len(self._kept) <= most:
                return
            self._kept.remove(text)
            self.cache.release(text.sequence)

    @property
    def is_empty(self) -> bool:
        """Return whether no request and no kept text has K/V."""
        return not self._by_request and not len(self._kept)

    def check(self, requests: Sequence[RequestText]) -> None:
        """Raise AssertionError unless only some of these requests hold slots, none of which another sequence has."""
        assert self._by_request.keys() <= set(requests), "a request that is not running holds K/V"
        own = {*self._by_request.values(), *(text.sequence for text in self._kept.texts())}
        assert own <= set(self.cache.pool.sequences), "a request has lost its KV slots"
        self.cache.pool.check()
