"""Requests of one engine that have K/V in a model's cache, and what they take of each other's."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.kv_cache.cache import KVCache
from hf_slospec.models.packed.model import DraftLevel, Outputs, PackedModel
from hf_slospec.models.packed.new_tokens import chain, chain_and_tree
from hf_slospec.models.recurrent.states import RecurrentStates
from hf_slospec.models.sequences.kept_texts import KeptText, KeptTexts, num_common

FIRST_ROOM = 512  # new tokens that a request has room for at first
NEVER = -1  # no state of a model's fingerprint
KEPT_STATES = 16  # texts that are kept at most where layers have states: one is as large as K/V of hundreds of tokens
MIN_SHARED = 16  # tokens whose K/V is computed faster than it is worth keeping or copying


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


class RequestSequences:
    """The requests of one engine that have K/V in a model's cache, which other engines may share.

    The K/V of requests that are over is kept where there is room, and given to requests whose texts begin alike: the
    text is taken over if little of it is left out, and otherwise copied. Requests that need the room get it.

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
        self._states: dict[RequestText, int] = {}  # of the model's fingerprint, when their first tokens were cached
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

    def limit(self, max_slots: int) -> None:
        """Set the slots of all requests and kept texts, and free the memory of those beyond; requests keep theirs."""
        self.max_slots = max_slots
        if self.num_held > max_slots:
            self._take_back_room_for_nodes()
        self._keep_at_most(max(max_slots - self.num_held, 0))
        others = self.cache.num_held - self.num_held - self._kept.num_tokens  # in the same pool
        with contextlib.suppress(MemoryError), as_memory_error():  # for the copy; then it is freed with the cache
            self.cache.shrink(max_slots + others)

    @property
    def num_held(self) -> int:
        """Slots of requests."""
        return sum(own.capacity for own in self._by_request.values())

    def _short(self, needed: Mapping[RequestText, int]) -> dict[RequestText, int]:
        """Return the requests that have fewer slots than needed, with what they need."""
        return {request: slots for request, slots in needed.items() if self._room_of(request) < slots}

    def _take_back_room_for_nodes(self) -> None:
        """Leave all requests the slots of their texts at their longest, and what they have cached."""
        for request, own in self._by_request.items():
            longest = max(len(request.tokens) + request.num_left, own.length)
            own.capacity = min(own.capacity, longest)

    def reserve_for(self, request: RequestText, length: int) -> None:
        """Make room for a text of this length of one request."""
        if self._room_of(request) < length:
            self._provide({request: length})

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

    def release(self, request: RequestText, may_keep: bool = True) -> None:
        """Drop the K/V of a request, if it has any, or keep it for requests that begin alike."""
        has_embeds = self._embeds.pop(request, None) is not None
        state, sequence = self._states.pop(request, None), self._by_request.pop(request, None)
        if sequence is None:
            return
        if may_keep and self._is_shareable(sequence, state) and not has_embeds and request.error is None:
            try:
                with as_memory_error():
                    self._keep(KeptText(request.cache_salt, request.tokens[: sequence.length], sequence))
            except MemoryError:  # for its states; they only save time
                self.cache.release(sequence)
        else:
            self.cache.release(sequence)

    def withhold(self, request: RequestText) -> None:
        """Keep the K/V of a request out of what is kept and shared, as it is not that of all its tokens."""
        self._states[request] = NEVER

    def close(self) -> None:
        """Release all requests and the cache: after its last user, its memory is freed or kept for its CUDA graphs."""
        for request in list(self._by_request):
            self.release(request, may_keep=False)
        self._keep_at_most(0)
        if self._cache is not None:
            self.packed.keep_if_captured(self._cache)
            self._cache = None

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

    # ---- texts that begin alike

    @property
    def num_kept(self) -> int:
        """Tokens of requests that are over whose K/V is kept."""
        return self._kept.num_tokens

    def num_reusable(self, request: RequestText) -> int:
        """Return how many tokens :meth:`reuse` would find now for a request without K/V; 0 for one that has some."""
        length = 0 if request in self._by_request else self._beginning_alike(request)[1]
        return length if length >= MIN_SHARED else 0

    def reuse(self, request: RequestText) -> int:
        """Give a request the K/V of the text which begins alike for longest, if it has less itself.

        Returns:
            The request's tokens whose K/V is cached now; never all, as the last one's logits are wanted.
        """
        source, length = self._beginning_alike(request)
        if length < self.num_cached(request) + MIN_SHARED:
            return self.num_cached(request)
        if isinstance(source, KeptText):
            self._kept.touch(source)  # so that it is the last to make room for the request
            is_new, left_out = request not in self._by_request, len(source.tokens) - length
            if is_new and (left_out < MIN_SHARED or not self._is_room_beside(source, request)):
                self._take_over(source, request, length)
            else:
                self._copy(source.sequence, request, length)
        elif source is not None:
            self._copy(source, request, length)
        return self.num_cached(request)

    def _beginning_alike(self, request: RequestText) -> tuple[KeptText | CachedSequence | None, int]:
        """Return the text, kept or of another request, that begins like this one for longest, and for how long."""
        if not self.max_kept or not self._is_plain(request.prompt_len + request.num_padding):
            return None, 0
        self.packed.fingerprint.notice()
        if self._kept_state != self.packed.fingerprint.state:
            self._keep_at_most(0)
        wanted = request.tokens[:-1][: self.packed.rope.max_plain]
        found = list[tuple[KeptText | CachedSequence, int]]()
        kept, length = self._kept.longest(wanted, request.cache_salt)
        if kept is not None and (length == len(kept.tokens) or not self.packed.has_states):
            found.append((kept, length))
        for other, sequence in self._by_request.items():
            is_open = self._is_shareable(sequence, self._states[other]) and other not in self._embeds
            if is_open and other is not request and other.cache_salt == request.cache_salt:
                length = min(num_common(other.tokens, wanted), sequence.length)
                if length == sequence.length or not self.packed.has_states:  # a state is of its whole text only
                    found.append((sequence, length))
        return max(found, key=lambda pair: pair[1], default=(None, 0))

    def _is_shareable(self, sequence: CachedSequence, state: int | None) -> bool:
        is_known = sequence.length >= MIN_SHARED and state == self.packed.fingerprint.state
        return bool(self.max_kept) and is_known and self._is_plain(sequence.prompt_len + sequence.num_padding)

    def _is_plain(self, length: int) -> bool:
        """Return whether the K of a prompt is that of other prompts, or its RoPE depends on its length."""
        return self.packed.rope.max_plain is None or length <= self.packed.rope.max_plain

    def _is_room_beside(self, text: KeptText, request: RequestText) -> bool:
        if self.max_slots is None:
            return True
        return self.num_held + len(text.tokens) + self._roomy_capacity(request) <= self.max_slots

    def _take_over(self, text: KeptText, request: RequestText, length: int) -> None:
        self._kept.remove(text)
        text.sequence.length = length
        text.sequence.capacity = min(text.sequence.capacity, max(length, self._capacity(request, 0)))
        text.sequence.prompt_len, text.sequence.num_padding = request.prompt_len, request.num_padding
        self._by_request[request], self._states[request] = text.sequence, self._kept_state

    def _copy(self, source: CachedSequence, request: RequestText, length: int) -> None:
        """Copy the first tokens' K/V, unless there is no room for both."""
        with contextlib.suppress(MemoryError), as_memory_error():  # the step that needs the room reports it
            self.reserve([request])
            if source.length >= length:  # it was not dropped to make room
                self.cache.pool.copy(source, self.of(request), length)

    def _keep(self, text: KeptText) -> None:
        if self._kept_state != self.packed.fingerprint.state:
            self._keep_at_most(0)
            self._kept_state = self.packed.fingerprint.state
        text.sequence.capacity = text.sequence.length
        if text.sequence.states is not None:  # frees what is staged
            text.sequence.states.take_in(text.sequence.length)
        for unneeded in self._kept.add(text):
            self.cache.release(unneeded.sequence)
        self._keep_at_most(self.max_kept)

    def _keep_at_most(self, num_tokens: float) -> None:
        """Drop the least recently used texts until those left have so many tokens at most."""
        most = KEPT_STATES if self.packed.has_states else len(self._kept)
        for text in self._kept.texts():
            if self._kept.num_tokens <= num_tokens and len(self._kept) <= most:
                return
            self._kept.remove(text)
            self.cache.release(text.sequence)

    # ---- forwards

    def forward(
        self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, feature_layers: tuple[int, ...] = ()
    ) -> Outputs:
        """Forward new tokens of requests; see :meth:`PackedModel.outputs`."""
        if self.max_kept:
            self.packed.fingerprint.notice()
        return self.packed.outputs(self.cache.pool, parts, logit_rows, feature_layers)

    def draft(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel) -> Any:
        """Forward a level of draft nodes of requests; see :meth:`PackedModel.draft`."""
        if self.max_kept:
            self.packed.fingerprint.notice()
        return self.packed.draft(self.cache.pool, parts, logit_rows, level)

    def uncached(self, request: RequestText) -> list[int]:
        """Return the request's committed tokens without K/V."""
        return request.tokens[self.of(request).length :]

    def prefill(self, request: RequestText, num_tokens: int) -> None:
        """Cache this many more of the request's tokens."""
        part = self.chain(request, self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64))
        self.of(request).length += num_tokens

    def chain(self, request: RequestText, tokens: Sequence[int]) -> NewTokens:
        """Return tokens that follow the request's cached ones, each seeing those before it."""
        return chain(self.packed, self.of(request), tokens, self._embeds.get(request))

    def chain_and_tree(self, request: RequestText, tokens: Sequence[int], tree: TokenTree) -> NewTokens:
        """Return tokens that follow the cached ones and end with the root, then the tree's other nodes."""
        return chain_and_tree(self.packed, self.of(request), tokens, tree, self._embeds.get(request))

    def give_embeds(self, request: RequestText, embeds: torch.Tensor) -> None:
        """Use these in place of the embeddings of the prompt's tokens.  [prompt_len, hidden]"""
        self._embeds[request] = embeds

    def load(
        self,
        request: RequestText,
        layers: Iterable[Sequence[torch.Tensor]],
        length: int,
        position_offset: int = 0,
        states: RecurrentStates | None = None,
    ) -> None:
        """Copy in the K/V of the request's first ``length`` tokens, see :meth:`KVCache.load`.

        ``position_offset`` is the difference between the positions of the tokens behind them and their places.
        """
        sequence = self.of(request)
        self.cache.load(sequence, layers, length, states)
        sequence.position_offset = position_offset

    def read(self, request: RequestText) -> list[tuple[torch.Tensor, ...]]:
        """Return views of the K/V of the request's cached tokens, each layer's [num_heads, length, dim]."""
        return self.cache.read(self.of(request))

    def states(self, request: RequestText) -> RecurrentStates | None:
        """Return the states after the request's cached tokens; None if the model has none."""
        sequence = self.of(request)
        if sequence.states is not None:
            sequence.states.take_in(sequence.length)
        return sequence.states
