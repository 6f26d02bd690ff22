"""Text split by the origin of its tokens: accepted drafts or the target."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from hf_slospec.serving.texts import TextStream, ToText


class TextPiece(NamedTuple):
    """A stretch of text whose tokens have one origin."""

    text: str
    is_draft: bool  # accepted drafts; otherwise chosen by the target


class HighlightedText:
    """A growing text; a character that consists of tokens of both origins belongs to the origin of its last token."""

    def __init__(self, to_text: ToText):
        self._stream, self._pieces, self._num_tokens = TextStream(to_text), list[TextPiece](), 0

    def update(self, tokens: list[int], from_draft: list[bool], is_last: bool = False) -> list[TextPiece]:
        """Return the pieces of all tokens so far.

        Args:
            tokens: all tokens so far, those of earlier calls included.
            from_draft: True for accepted drafts, one per token.
            is_last: no further tokens come.
        """
        fresh = list(zip(tokens, from_draft, strict=False))[self._num_tokens :]
        for is_draft, run in groupby(fresh, key=lambda pair: pair[1]):
            if text := self._stream.push([token for token, _ in run], is_last=False):
                self._pieces.append(TextPiece(text, is_draft))
        self._num_tokens += len(fresh)
        if is_last and from_draft and (rest := self._stream.push([], is_last=True)):
            self._pieces.append(TextPiece(rest, from_draft[-1]))
        return list(self._pieces)
