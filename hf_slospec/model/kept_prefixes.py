"""Kept prefixes: tokens of finished requests whose K/V is kept for requests with the same first
tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hf_slospec.model.batch import CachedSequence
from hf_slospec.request.params import RequestParams


class RequestTokens(Hashable, Protocol):
    """Token sequence that K/V is cached for: a request, or its translation for a draft with another
    tokenizer.
    """

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed tokens."""

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be added, at most."""

    @property
    def error(self) -> BaseException | None:
        """Error that ended the request; None if there is none."""

    @property
    def params(self) -> RequestParams:
        """Options of the request. A translation's options have an empty prompt, as the prompt's
        length matters for the target only.
        """


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """Tokens of a finished request with their K/V."""

    salt: str  # only requests with this cache_salt may use the K/V
    tokens: list[int]
    sequence: CachedSequence

    @property
    def key(self) -> tuple[str, list[int]]:
        return self.salt, self.tokens

    def begins_with(self, other: KeptPrefix) -> bool:
        """Return whether this prefix starts with all tokens of ``other``, and has the same salt."""
        return (self.salt, self.tokens[: len(other.tokens)]) == other.key


class KeptPrefixes:
    """Kept prefixes in two lists: sorted by their tokens, and sorted by their last use.

    In the list sorted by tokens, the prefix that shares the most leading tokens with a request is
    next to the place at which the request's tokens would be inserted.
    """

    def __init__(self) -> None:
        self._sorted: list[KeptPrefix] = []
        self._by_age: OrderedDict[KeptPrefix, None] = OrderedDict()  # least recently used first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def by_age(self) -> list[KeptPrefix]:
        """Return the prefixes sorted by last use, the least recently used first."""
        return list(self._by_age)

    def evict(self, num_tokens: float, max_prefixes: int) -> Iterator[KeptPrefix]:
        """Remove and yield the least recently used prefixes, until at most ``max_prefixes``
        prefixes with at most ``num_tokens`` tokens in total are left.
        """
        for prefix in self.by_age():
            if self.num_tokens <= num_tokens and len(self) <= max_prefixes:
                return
            self.remove(prefix)
            yield prefix

    def add(self, prefix: KeptPrefix) -> list[KeptPrefix]:
        """Keep a prefix, and return the prefixes that are no longer needed because a longer kept
        prefix starts with their tokens. The result may be the new prefix itself.
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
        """Mark a prefix as the most recently used one."""
        self._by_age.move_to_end(prefix)

    def longest(self, tokens: Sequence[int], salt: str) -> tuple[KeptPrefix | None, int]:
        """Return the prefix that shares the most leading tokens with ``tokens``, and the number of
        shared tokens; (None, 0) if no prefix has this salt.
        """
        at = self._place((salt, tokens))
        near = [prefix for prefix in self._sorted[max(at - 1, 0) : at + 1] if prefix.salt == salt]
        lengths = [num_common(prefix.tokens, tokens) for prefix in near]
        return max(zip(near, lengths, strict=True), key=lambda pair: pair[1], default=(None, 0))


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    if not a or not b or a[0] != b[0]:
        return 0  # a shortcut, as this is the most common case
    return bisect_left(
        range(min(len(a), len(b))), True, key=lambda index: a[: index + 1] != b[: index + 1]
    )
