"""A text in pieces that say where their tokens came from."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from hf_slospec.serving.handle import TextStream, ToText


class Piece(NamedTuple):
    text: str
    is_draft: bool  # proposed by the draft and accepted; else chosen by the target alone


class HighlightedText:
    """A growing text; a character whose tokens come from both goes with its last token."""

    def __init__(self, to_text: ToText):
        self._stream, self._pieces, self._num_tokens = TextStream(to_text), list[Piece](), 0

    def take(self, tokens: list[int], from_draft: list[bool]) -> list[Piece]:
        """All tokens so far, and whether each is an accepted draft.  -> all pieces so far"""
        fresh = list(zip(tokens, from_draft, strict=False))[self._num_tokens :]
        for is_draft, run in groupby(fresh, key=lambda pair: pair[1]):
            if text := self._stream.push([token for token, _ in run], is_last=False):
                self._pieces.append(Piece(text, is_draft))
        self._num_tokens += len(fresh)
        return list(self._pieces)
