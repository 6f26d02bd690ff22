"""Tokens of requests, and those of finished ones whose K/V is kept for requests that begin alike."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hf_slospec.model.batch import CachedSequence
from hf_slospec.request.params import RequestParams


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
        """Options of the request; a translation's have no prompt, whose length matters for the
        target only.
        """


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """Tokens with their K/V."""

    salt: str  # only requests with the same cache_salt may use it
    tokens: list[int]
    sequence: CachedSequence

    @property
    def key(self) -> tuple[str, list[int]]:
        return self.salt, self.tokens

    def begins_with(self, other: KeptPrefix) -> bool:
        """Return whether the tokens of another prefix are the first of these, for the same salt."""
        return (self.salt, self.tokens[: len(other.tokens)]) == other.key


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
        """Return the prefixes, the least recently used first."""
        return list(self._by_age)

    def evict(self, num_tokens: float, max_prefixes: int) -> Iterator[KeptPrefix]:
        """Yield the least recently used prefixes, until there are at most ``max_prefixes`` with at
        most ``num_tokens`` tokens; each is removed.
        """
        for prefix in self.by_age():
            if self.num_tokens <= num_tokens and len(self) <= max_prefixes:
                return
            self.remove(prefix)
            yield prefix

    def add(self, prefix: KeptPrefix) -> list[KeptPrefix]:
        """Keep a prefix, and return those that are not kept any longer, as a longer one begins with
        their tokens.
        """
        at = self._place(prefix.key)
        longer = self._sorted[at : at + 1]
        if longer and longer[0].begins_with(prefix):
            self.touch(longer[0])
            return [prefix]
        shorter = [kept for kept in self._sorted[max(at - 1, 0) : at] if prefix.begins_with(kept)]
        self._sorted.insert(at, prefix)
        self._by_age[prefix] = None
        self.num_tokens += len(prefix.tokens)
        for kept in shorter:
            self.remove(kept)
        return shorter

    def _place(self, key: tuple[str, Sequence[int]]) -> int:
        return bisect_left(self._sorted, key, key=lambda kept: kept.key)

    def remove(self, prefix: KeptPrefix) -> None:
        at = self._place(prefix.key)
        assert self._sorted[at] is prefix, "no two kept prefixes are equal"
        del self._sorted[at], self._by_age[prefix]
        self.num_tokens -= len(prefix.tokens)

    def touch(self, prefix: KeptPrefix) -> None:
        """Make a prefix the most recently used one."""
        self._by_age.move_to_end(prefix)

    def longest(self, tokens: Sequence[int], salt: str) -> tuple[KeptPrefix | None, int]:
        """Return the prefix that shares the most leading tokens with these, and how many."""
        at = self._place((salt, tokens))
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
