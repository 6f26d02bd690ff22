"""Texts whose requests are over and whose K/V is kept, for requests that begin alike."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hf_slospec.models.batch.cached_sequence import CachedSequence


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text with its K/V."""

    salt: str  # only requests with the same one may use it
    tokens: list[int]
    sequence: CachedSequence

    @property
    def key(self) -> tuple[str, list[int]]:
        """Place in the order by which texts are found."""
        return self.salt, self.tokens


class KeptTexts:
    """Kept texts, found by the tokens they begin with, and in the order of their last use.

    In a sorted list, the text that shares the most leading tokens with another one is next to where that one would be.
    """

    def __init__(self) -> None:
        self._sorted: list[KeptText] = []
        self._by_age: OrderedDict[KeptText, None] = OrderedDict()  # the least recently used first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def texts(self) -> list[KeptText]:
        """Return all texts, the least recently used first."""
        return list(self._by_age)

    def add(self, text: KeptText) -> list[KeptText]:
        """Keep a text, and return those that are not kept any longer: what another one begins with, if only itself."""
        at = bisect_left(self._sorted, text.key, key=lambda kept: kept.key)
        after = self._sorted[at] if at < len(self._sorted) else None
        if after is not None and after.salt == text.salt and after.tokens[: len(text.tokens)] == text.tokens:
            self.touch(after)
            return [text]
        self._sorted.insert(at, text)
        self._by_age[text] = None
        self.num_tokens += len(text.tokens)
        before = self._sorted[at - 1] if at else None
        if before is not None and before.salt == text.salt and before.tokens == text.tokens[: len(before.tokens)]:
            self.remove(before)
            return [before]
        return []

    def remove(self, text: KeptText) -> None:
        """Keep a text no longer."""
        at = bisect_left(self._sorted, text.key, key=lambda kept: kept.key)
        assert self._sorted[at] is text, "no two kept texts are equal"
        del self._sorted[at], self._by_age[text]
        self.num_tokens -= len(text.tokens)

    def touch(self, text: KeptText) -> None:
        """Make a text the most recently used one."""
        self._by_age.move_to_end(text)

    def longest(self, tokens: Sequence[int], salt: str) -> tuple[KeptText | None, int]:
        """Return the text that shares the most leading tokens with these, and how many."""
        at = bisect_left(self._sorted, (salt, tokens), key=lambda kept: kept.key)
        near = [text for text in self._sorted[max(at - 1, 0) : at + 1] if text.salt == salt]
        lengths = [num_common(text.tokens, tokens) for text in near]
        return max(zip(near, lengths, strict=True), key=lambda pair: pair[1], default=(None, 0))


def num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many leading tokens two texts share."""
    if not some or not others or some[0] != others[0]:
        return 0  # most texts
    most = min(len(some), len(others))
    return bisect_left(range(most), True, key=lambda place: some[: place + 1] != others[: place + 1])
