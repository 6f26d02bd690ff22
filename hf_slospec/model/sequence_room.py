"""Token ids of finished requests whose K/V is kept, for requests that begin with the same tokens."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.kv_cache import KVCache
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import RequestParams


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """Tokens with their K/V."""

    salt: str  # only requests with the same cache_salt may use it
    tokens: list[int]
    sequence: CachedSequence

    @property
    def key(self) -> tuple[str, list[int]]:
        """Sort key."""
        return self.salt, self.tokens


class KeptPrefixes:
    """Kept prefixes in two orders: sorted by their tokens, and by their last use.

    In the sorted list, the prefix that shares the most leading tokens with a request is next to
    where the request's tokens would be inserted.
    """

    def __init__(self) -> None:
        self._sorted: list[KeptPrefix] = []
        self._by_age: OrderedDict[KeptPrefix, None] = OrderedDict()  # least recently used first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def by_age(self) -> list[KeptPrefix]:
        """Return all prefixes, the least recently used first."""
        return list(self._by_age)

    def add(self, prefix: KeptPrefix) -> list[KeptPrefix]:
        """Keep a prefix, and return those that are not kept any longer, as a longer one begins with
        their tokens.
        """
        at = bisect_left(self._sorted, prefix.key, key=lambda kept: kept.key)
        after = self._sorted[at] if at < len(self._sorted) else None
        if (
            after is not None
            and after.salt == prefix.salt
            and after.tokens[: len(prefix.tokens)] == prefix.tokens
        ):
            self.touch(after)
            return [prefix]
        self._sorted.insert(at, prefix)
        self._by_age[prefix] = None
        self.num_tokens += len(prefix.tokens)
        before = self._sorted[at - 1] if at else None
        if (
            before is not None
            and before.salt == prefix.salt
            and before.tokens == prefix.tokens[: len(before.tokens)]
        ):
            self.remove(before)
            return [before]
        return []

    def remove(self, prefix: KeptPrefix) -> None:
        """Remove a prefix."""
        at = bisect_left(self._sorted, prefix.key, key=lambda kept: kept.key)
        assert self._sorted[at] is prefix, "no two kept prefixes are equal"
        del self._sorted[at], self._by_age[prefix]
        self.num_tokens -= len(prefix.tokens)

    def touch(self, prefix: KeptPrefix) -> None:
        """Make a prefix the most recently used one."""
        self._by_age.move_to_end(prefix)

    def longest(self, tokens: Sequence[int], salt: str) -> tuple[KeptPrefix | None, int]:
        """Return the prefix that shares the most leading tokens with these, and how many."""
        at = bisect_left(self._sorted, (salt, tokens), key=lambda kept: kept.key)
        near = [prefix for prefix in self._sorted[max(at - 1, 0) : at + 1] if prefix.salt == salt]
        lengths = [num_common(prefix.tokens, tokens) for prefix in near]
        return max(zip(near, lengths, strict=True), key=lambda pair: pair[1], default=(None, 0))


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    if not a or not b or a[0] != b[0]:
        return 0  # the common case
    return bisect_left(
        range(min(len(a), len(b))), True, key=lambda index: a[: index + 1] != b[: index + 1]
    )


FIRST_ROOM = 512  # new tokens for which a request has slots at first, if its prompt is shorter
# Maximum number of prefixes if layers have states, each as large as the K/V of hundreds of tokens
KEPT_STATES = 16


class RequestTokens(Hashable, Protocol):
    """Tokens that have K/V: those of a request, or their translation for a draft with another
    tokenizer.
    """

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed tokens."""

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be added, as far as that is known."""

    @property
    def error(self) -> BaseException | None:
        """Error that ended the request."""

    @property
    def params(self) -> RequestParams:
        """Options of the request; those of a translation have no prompt, whose length matters for
        the target only.
        """


class SequenceRoom:
    """Slots of one engine's requests in a model's K/V cache, which other engines may share.

    Kept prefixes use free slots. If requests need these, the least recently used prefixes are
    evicted.

    All methods but the constructor require the model's lock.
    """

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        max_slots: int | None = None,
        max_kept: float | None = None,
    ):
        """Make a room that has no requests yet.

        Args:
            max_nodes: maximum number of tree nodes of one request that are staged at a time.
            max_slots: maximum number of slots of all requests and kept prefixes; None: no limit.
            max_kept: maximum number of tokens of kept prefixes; 0: requests share only while they
                run; None: never.
        """
        self.packed, self.max_nodes, self.max_slots, self.max_kept = (
            packed,
            max_nodes,
            max_slots,
            max_kept,
        )
        self._cache: KVCache | None = None
        self._by_request: dict[RequestTokens, CachedSequence] = {}
        self._embeds: dict[RequestTokens, torch.Tensor] = {}
        self._states: dict[
            RequestTokens, int
        ] = {}  # the model's version when the first tokens were cached
        self._kept = KeptPrefixes()
        self._kept_state = 0
        self.decided_state: int | None = (
            None  # state of the weights on which several processes agreed, if they must
        )

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

    @property
    def has_embeds(self) -> bool:
        """Return whether a request has embeddings in place of those of its prompt's tokens."""
        return bool(self._embeds)

    @property
    def num_held(self) -> int:
        """Number of slots of requests."""
        return sum(sequence.capacity for sequence in self._by_request.values())

    @property
    def num_kept(self) -> int:
        """Number of tokens of kept prefixes."""
        return self._kept.num_tokens

    def reserve(
        self, requests: Sequence[RequestTokens], num_nodes: Sequence[int] | None = None
    ) -> None:
        """Reserve slots for one more step of these requests, known or new, while nothing is staged.

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
        try:
            self._provide(
                {request: self._roomy_capacity(request) for request in self._lacking(needed)}
            )
        except MemoryError:
            needed |= {
                request: used
                for request, used in self._used().items()
                if used > needed.get(request, 0)
            }
            shared = (
                0
                if self.max_slots is None
                else max(self.max_slots - sum(needed.values()), 0) // len(needed)
            )
            if shared:
                with contextlib.suppress(MemoryError):
                    self._divide(needed, shared)
                    return
            self._divide(needed, 0)

    def reserve_for(self, request: RequestTokens, length: int) -> None:
        """Reserve slots for ``length`` tokens of one request."""
        if self._room_of(request) < length:
            self._provide({request: length})

    def _lacking(self, needed: Mapping[RequestTokens, int]) -> dict[RequestTokens, int]:
        """Return the slots needed by the requests that have fewer."""
        return {
            request: slots for request, slots in needed.items() if self._room_of(request) < slots
        }

    def _divide(self, needed: Mapping[RequestTokens, int], room: int) -> None:
        """Give all requests the slots that they need and those of up to ``room`` further tokens;
        take others back.
        """
        capacities = {
            request: slots + min(request.num_left, room) for request, slots in needed.items()
        }
        self._check_limit(sum(capacities.values()))
        for request, sequence in self._by_request.items():
            sequence.capacity = min(sequence.capacity, capacities[request])
        self._provide(self._lacking(capacities))

    def _check_limit(self, needed: int) -> None:
        if self.max_slots is not None and needed > self.max_slots:
            raise MemoryError(f"{needed} KV slots are needed, and there may be {self.max_slots}")

    def _used(self) -> dict[RequestTokens, int]:
        """Return the slots of the tokens of all requests, with and without K/V."""
        return {
            request: max(len(request.tokens), sequence.length)
            for request, sequence in self._by_request.items()
        }

    def _room_of(self, request: RequestTokens) -> int:
        return self._by_request[request].capacity if request in self._by_request else 0

    def _roomy_capacity(self, request: RequestTokens) -> int:
        return self._capacity(request, max(len(request.tokens), FIRST_ROOM))

    def _capacity(self, request: RequestTokens, room: int) -> int:
        """Return the slots for a request's tokens, up to ``room`` further ones, and one step's
        nodes.
        """
        return len(request.tokens) + min(request.num_left, room) + self.max_nodes

    def _provide(self, capacities: dict[RequestTokens, int]) -> None:
        """Give requests ranges of slots of these capacities, and move their K/V there."""
        if not capacities:
            return
        limit, held = (
            self.max_slots,
            {request: sequence.capacity for request, sequence in self._by_request.items()},
        )
        if limit is not None:
            self._check_limit(needed := sum((held | capacities).values()))
            self._keep_at_most(limit - needed)
            # Slots of other engines in the same pool do not count.
            limit += self.cache.num_held - sum(held.values()) - self._kept.num_tokens
        sequences = {
            request: self._by_request.get(request) or CachedSequence() for request in capacities
        }
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
            sequence.prompt_len, sequence.num_padding = (
                len(request.params.prompt),
                request.params.num_padding,
            )
            if sequence.encoded is None and request.params.encoded_for is not None:
                sequence.encoded = request.params.encoded_for(self.packed.model)
            self._states.setdefault(request, self.weights_state)

    def _reserve(self, slots: dict[CachedSequence, int], limit: int | None) -> None:
        with as_memory_error():
            self.cache.reserve(slots, limit)

    def _keep_at_most(self, num_tokens: float) -> None:
        """Evict the least recently used prefixes until the others have at most ``num_tokens``
        tokens.
        """
        max_prefixes = KEPT_STATES if self.packed.has_states else len(self._kept)
        for prefix in self._kept.by_age():
            if self._kept.num_tokens <= num_tokens and len(self._kept) <= max_prefixes:
                return
            self._kept.remove(prefix)
            self.cache.release(prefix.sequence)

    @property
    def is_empty(self) -> bool:
        """Return whether there is neither a request with K/V nor a kept prefix."""
        return not self._by_request and not len(self._kept)

    def check(self, requests: Sequence[RequestTokens]) -> None:
        """Raise AssertionError if another request than these holds slots, or two sequences share a
        slot.
        """
        assert self._by_request.keys() <= set(requests), "a request that is not running holds K/V"
        sequences = {
            *self._by_request.values(),
            *(prefix.sequence for prefix in self._kept.by_age()),
        }
        assert sequences <= set(self.cache.pool.sequences), "a request has lost its KV slots"
        self.cache.pool.check()
