"""K/V of requests: their slots in a model's cache, and reuse between requests that begin alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_slospec.model.batch import CachedSequence, NewTokens, SequenceStates
from hf_slospec.model.inputs import DraftLevel, Outputs
from hf_slospec.model.kept_prefixes import KeptPrefix, KeptPrefixes, RequestTokens, num_common
from hf_slospec.model.kv_cache import KVCache
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.tree_mask import chain

NEVER = -1  # equals no version of a model
MIN_SHARED = 16  # tokens; computing the K/V of fewer is faster than keeping or copying it
FIRST_ROOM = 512  # new tokens for which a request has slots at first, if its prompt is shorter
# Maximum number of prefixes if layers have states, each as large as the K/V of hundreds of tokens.
KEPT_STATES = 16


class Sequences:
    """The requests of one engine in a model's K/V cache, which other engines may share.

    K/V of finished requests is kept while there is room, for requests with the same first tokens: a
    request takes a kept sequence over if it uses nearly all of it, and copies it otherwise. If
    requests need the slots, the least recently used prefixes are evicted.

    All methods but the constructor require the model's lock.
    """

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        max_slots: int | None = None,
        max_kept: float | None = None,
    ):
        """Begin without requests.

        Args:
            max_nodes: maximum number of tree nodes of one request that are staged at a time.
            max_slots: maximum number of slots of all requests and kept prefixes; None: no limit.
            max_kept: maximum number of tokens of kept prefixes; 0: requests share only while they
                run; None: never.
        """
        self.packed = packed
        self.max_nodes = max_nodes
        self.max_slots = max_slots
        self.max_kept = max_kept
        self._cache: KVCache | None = None
        self._by_request: dict[RequestTokens, CachedSequence] = {}
        self._withheld = set[RequestTokens]()  # requests whose K/V must not be reused
        self._kept = KeptPrefixes()
        self._kept_state = 0  # weights_state of all kept prefixes
        self.decided_state: int | None = None  # that on which several processes agreed

    @property
    def weights_state(self) -> int:
        """State of the model's weights; K/V of one is of no use in another."""
        return self.packed.version.weights if self.decided_state is None else self.decided_state

    @property
    def cache(self) -> KVCache:
        """The model's cache, held from the first use until ``close``."""
        if self._cache is None:
            self._cache = self.packed.kv_cache
        return self._cache

    def of(self, request: RequestTokens) -> CachedSequence:
        """Return the sequence of a request that has slots."""
        return self._by_request[request]

    def num_cached(self, request: RequestTokens) -> int:
        """Return the number of the request's tokens whose K/V is cached."""
        return self._by_request[request].length if request in self._by_request else 0

    def uncached(self, request: RequestTokens) -> list[int]:
        """Return the request's committed tokens without K/V."""
        return request.tokens[self.num_cached(request) :]

    @property
    def has_embeds(self) -> bool:
        """Return whether a request has embeddings in place of those of its prompt's tokens."""
        return any(sequence.embeds is not None for sequence in self._by_request.values())

    @property
    def is_empty(self) -> bool:
        """Return whether there is neither a request with K/V nor a kept prefix."""
        return not (self._by_request or self._kept.num_tokens)

    @property
    def num_held(self) -> int:
        """K/V slots reserved for running requests (capacity, not tokens)."""
        return sum(sequence.capacity for sequence in self._by_request.values())

    @property
    def num_kept(self) -> int:
        """Tokens of kept prefixes."""
        return self._kept.num_tokens

    # ---- slots

    def reserve(
        self, requests: Sequence[RequestTokens], num_nodes: Sequence[int] | None = None
    ) -> None:
        """Reserve slots for one more step of these requests, while nothing is staged.

        ``max_new_tokens`` is often far more than a request emits, so a request starts with few
        slots. When they are used up, it gets as many more as it has tokens. If slots are short,
        each request has what this step needs, and an equal share of those that are left.

        Args:
            requests: those of the step.
            num_nodes: nodes of each request's tree, its root not counted; None: as many as it may
                have.

        Raises:
            MemoryError: the step needs more than ``max_slots`` or more memory than is free. Nothing
                has changed.
        """
        sizes = [self.max_nodes] * len(requests) if num_nodes is None else num_nodes
        needed = {
            request: len(request.tokens) + size
            for request, size in zip(requests, sizes, strict=True)
        }
        lacking = [each for each, slots in needed.items() if self._capacity(each) < slots]
        try:
            self._provide({request: self._first_capacity(request) for request in lacking})
        except MemoryError:
            for request, sequence in self._by_request.items():
                used = max(len(request.tokens), sequence.length)
                needed[request] = max(needed.get(request, 0), used)
            if self.max_slots is not None:
                room = (self.max_slots - sum(needed.values())) // len(needed)
                if room > 0:
                    with contextlib.suppress(MemoryError):
                        self._divide(needed, room)
                        return
            self._divide(needed, 0)

    def reserve_for(self, request: RequestTokens, length: int) -> None:
        """Reserve slots for ``length`` tokens of one request."""
        self._provide({request: length})

    def _capacity(self, request: RequestTokens) -> int:
        return self._by_request[request].capacity if request in self._by_request else 0

    def _divide(self, needed: Mapping[RequestTokens, int], room: int) -> None:
        """Give all requests the slots needed and up to ``room`` further ones; take others back."""
        capacities = {
            request: slots + min(request.num_left, room) for request, slots in needed.items()
        }
        self._check_limit(sum(capacities.values()))
        for request, sequence in self._by_request.items():
            sequence.capacity = min(sequence.capacity, capacities[request])
        self._provide(capacities)

    def _check_limit(self, needed: int) -> None:
        if self.max_slots is not None and needed > self.max_slots:
            raise MemoryError(f"{needed} KV slots are needed, and there may be {self.max_slots}")

    def _first_capacity(self, request: RequestTokens) -> int:
        """Return the slots for a request's tokens, some further ones, and one step's nodes."""
        room = min(request.num_left, max(len(request.tokens), FIRST_ROOM))
        return len(request.tokens) + room + self.max_nodes

    def _provide(self, capacities: Mapping[RequestTokens, int]) -> None:
        """Give requests ranges of at least these capacities, and move their K/V there."""
        more = {each: slots for each, slots in capacities.items() if self._capacity(each) < slots}
        if not more:
            return
        limit = self.max_slots
        if limit is not None:
            needed = self.num_held + sum(more.values()) - sum(map(self._capacity, more))
            self._check_limit(needed)
            self._keep_at_most(limit - needed)
            # Slots of other engines in the same pool do not count.
            limit += self.cache.num_held - self.num_held - self._kept.num_tokens
        sequences = {request: self._by_request.get(request) or CachedSequence() for request in more}
        slots = {sequences[request]: slots for request, slots in more.items()}
        try:
            self.cache.reserve(slots, limit)
        except MemoryError:
            if not self._kept.num_tokens:
                raise
            self._keep_at_most(0)
            self.cache.reserve(slots, limit)
        for request, sequence in sequences.items():
            self._by_request[request] = sequence
            self._describe(sequence, request)
            if sequence.encoded is None and request.params.encoded_for is not None:
                sequence.encoded = request.params.encoded_for(self.packed.model)
            if sequence.weights_state is None:
                is_withheld = request in self._withheld
                sequence.weights_state = NEVER if is_withheld else self.weights_state

    @staticmethod
    def _describe(sequence: CachedSequence, request: RequestTokens) -> None:
        sequence.prompt_len = len(request.params.prompt)
        sequence.num_padding = request.params.num_padding

    def _keep_at_most(self, num_tokens: float) -> None:
        """Evict the least recently used prefixes until ``num_tokens`` tokens are left at most."""
        max_prefixes = KEPT_STATES if self.packed.family.has_states else len(self._kept)
        for prefix in self._kept.evict(num_tokens, max_prefixes):
            self.cache.release(prefix.sequence)

    def release(self, request: RequestTokens, may_keep: bool = True) -> None:
        """Keep the K/V of a finished request, if it has any that may be kept, or drop it."""
        self._withheld.discard(request)
        sequence = self._by_request.pop(request, None)
        if sequence is None:
            return
        may_keep = may_keep and bool(self.max_kept) and request.error is None
        if may_keep and self._is_shareable(sequence):
            # Without memory to update its states, it is not kept, and later requests take longer.
            tokens = request.tokens[: sequence.length]
            with contextlib.suppress(MemoryError), as_memory_error():
                self._keep(KeptPrefix(request.params.cache_salt, tokens, sequence))
                return
        self.cache.release(sequence)

    def close(self) -> None:
        """Release all requests and the cache, whose last user frees its memory unless graphs use it."""
        for request in list(self._by_request):
            self.release(request, may_keep=False)
        self._keep_at_most(0)
        if self._cache is not None:
            self.packed.keep_if_captured(self._cache)
            self._cache = None

    def check(self, requests: Sequence[RequestTokens]) -> None:
        """Raise AssertionError if a request but these holds slots, or two sequences share one."""
        assert self._by_request.keys() <= set(requests), "a request that is not running holds K/V"
        kept = (prefix.sequence for prefix in self._kept.by_age())
        sequences = {*self._by_request.values(), *kept}
        assert sequences <= set(self.cache.pool.sequences), "a request has lost its KV slots"
        self.cache.pool.check()

    # ---- reuse

    def withhold(self, request: RequestTokens) -> None:
        """Never reuse the K/V of a request: it depends on more than the request's tokens."""
        self._withheld.add(request)
        if request in self._by_request:
            self.of(request).weights_state = NEVER

    def num_reusable(self, request: RequestTokens) -> int:
        """Return how many tokens :meth:`reuse` would find now; 0 for a request that has K/V."""
        length = 0 if request in self._by_request else self._longest_match(request)[2]
        return length if length >= MIN_SHARED else 0

    def reuse(self, request: RequestTokens) -> int:
        """Give a request the K/V of the sequence that shares the most leading tokens.

        Returns:
            Number of the request's tokens whose K/V is cached now; never all, as the last one's
            logits are needed.
        """
        prefix, source, length = self._longest_match(request)
        if source is None or length < self.num_cached(request) + MIN_SHARED:
            return self.num_cached(request)
        if prefix is not None:
            self._kept.touch(prefix)  # so that it is evicted last to make room for the request
            is_most = source.length < length + MIN_SHARED
            needed = self.num_held + source.length + self._first_capacity(request)
            is_room = self.max_slots is None or needed <= self.max_slots
            if request not in self._by_request and (is_most or not is_room):
                self._take_over(prefix, request, length)
                return length
        self._copy(source, request, length)
        return self.num_cached(request)

    def _longest_match(
        self, request: RequestTokens
    ) -> tuple[KeptPrefix | None, CachedSequence | None, int]:
        """Return the sequence that shares the most leading tokens, its prefix if kept, and how many."""
        params = request.params
        if self.max_kept is None or not self._is_plain(len(params.prompt) + params.num_padding):
            return None, None, 0
        self.packed.version.notice(structure=False)
        if self._kept_state != self.weights_state:
            self._keep_at_most(0)
        wanted = request.tokens[:-1][: self.packed.rope.max_plain]
        matches = list[tuple[KeptPrefix | None, CachedSequence, int]]()
        prefix, length = self._kept.longest(wanted, params.cache_salt)
        if prefix is not None:
            matches.append((prefix, prefix.sequence, length))
        for other, sequence in self._by_request.items():
            is_open = other is not request and other.params.cache_salt == params.cache_salt
            if is_open and self._is_shareable(sequence):
                length = min(num_common(other.tokens, wanted), sequence.length)
                matches.append((None, sequence, length))
        if self.packed.family.has_states:  # a state cannot be cut to fewer tokens
            matches = [match for match in matches if match[2] == match[1].length]
        return max(matches, key=lambda match: match[2], default=(None, None, 0))

    def _is_shareable(self, sequence: CachedSequence) -> bool:
        return (
            self.max_kept is not None
            and sequence.embeds is None
            and sequence.length >= MIN_SHARED
            and sequence.weights_state == self.weights_state
            and self._is_plain(sequence.prompt_len + sequence.num_padding)
        )

    def _is_plain(self, length: int) -> bool:
        """Return whether a prompt of this length gets the RoPE of shorter ones."""
        return self.packed.rope.max_plain is None or length <= self.packed.rope.max_plain

    def _take_over(self, prefix: KeptPrefix, request: RequestTokens, length: int) -> None:
        self._kept.remove(prefix)
        sequence = prefix.sequence
        sequence.length = length
        needed = max(length, len(request.tokens) + self.max_nodes)
        sequence.capacity = min(sequence.capacity, needed)
        self._describe(sequence, request)
        self._by_request[request] = sequence

    def _copy(self, source: CachedSequence, request: RequestTokens, length: int) -> None:
        """Copy the K/V of the first ``length`` tokens, unless there is no room for both sequences."""
        # The step that needs the room raises the error again.
        with contextlib.suppress(MemoryError), as_memory_error():
            self.reserve([request])
            if source.length >= length:  # it was not evicted to make room
                self.cache.pool.copy(source, self.of(request), length)

    def _keep(self, prefix: KeptPrefix) -> None:
        if self._kept_state != self.weights_state:
            self._keep_at_most(0)
            self._kept_state = self.weights_state
        prefix.sequence.capacity = prefix.sequence.length
        if prefix.sequence.states is not None:  # free what is staged
            prefix.sequence.states.take_in(prefix.sequence.length)
        for unneeded in self._kept.add(prefix):
            self.cache.release(unneeded.sequence)
        self._keep_at_most(self.max_kept or 0)

    # ---- forwards

    def forward(
        self,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...] = (),
    ) -> Outputs:
        """Forward new tokens of requests; see :meth:`PackedModel.outputs`."""
        if self.max_kept is not None:
            self.packed.version.notice()
        for part in parts:
            part.sequence.staged_end = part.sequence.length + part.num_tokens
        return self.packed.outputs(self.cache.pool, parts, logit_rows, feature_layers)

    def draft(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel) -> Any:
        """Forward a level of draft nodes of requests; see :meth:`PackedModel.draft`."""
        if self.max_kept is not None:
            self.packed.version.notice(structure=False)
        return self.packed.draft(self.cache.pool, parts, logit_rows, level)

    def prefill(self, request: RequestTokens, num_tokens: int) -> None:
        """Compute the K/V of the request's next ``num_tokens`` tokens."""
        part = chain(self.packed, self.of(request), self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64, device="cpu"))
        self.of(request).length += num_tokens

    # ---- K/V that others computed

    def load(
        self,
        request: RequestTokens,
        layers: Iterable[Sequence[torch.Tensor]],
        length: int,
        position_offset: int = 0,
        states: SequenceStates | None = None,
    ) -> None:
        """Copy in the K/V of the request's first ``length`` tokens, and take over the states after
        them.

        Args:
            layers: as in :meth:`KVCache.write`.
            position_offset: positions of later tokens minus their indices.
        """
        sequence = self.of(request)
        self.cache.write(sequence, layers, length)
        sequence.length = length
        sequence.states = states
        sequence.position_offset = position_offset

    def replace(self, request: RequestTokens, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write each layer's K, V and index keys [num_heads, 1, dim] of the first uncached token."""
        self.cache.write(self.of(request), layers, self.num_cached(request) + 1)
