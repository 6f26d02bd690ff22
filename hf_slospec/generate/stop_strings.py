"""Stop strings as transformers finds them, by search in the text of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation import StoppingCriteria, StopStringCriteria

Text = Any  # str or bytes, by the kind of tokenizer


class _Vocabulary:
    """The text of every token, from ``StopStringCriteria``."""

    def __init__(self, tokenizer: Any):
        self.size = len(tokenizer)
        self.mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        texts, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=self.mode)
        self.texts: dict[int, Text] = dict(zip(ids, texts, strict=True))
        self.beginnings = {text[:end] for text in texts for end in range(1, len(text) + 1)}

    def can_end(self, stop: Text) -> bool:
        """Return whether some token begins with a suffix of the stop string, or contains the whole string."""
        return any(stop[begin:] in self.beginnings for begin in range(len(stop))) or any(
            stop in text for text in self.texts.values()
        )


_known: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    known = _known.get(tokenizer)
    if known is None or known.size != len(tokenizer):  # tokens may be added
        known = _known[tokenizer] = _Vocabulary(tokenizer)
    return known


class StopStrings(StoppingCriteria):
    """Criterion that is met where ``StopStringCriteria`` is, at the first token that completes a stop string.

    That class first matches every token of the vocabulary with every position of every stop string, which takes minutes
    for a few thousand characters. This one searches the text of the last tokens.
    """

    per_row = True  # no state; every row by itself

    def __init__(self, tokenizer: Any, stop_strings: str | Sequence[str]):
        """Prepare the search for strings in the tokens of a tokenizer.

        Raises:
            ValueError: there is none, one is empty, or the tokenizer has no token with which one could end.
        """
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if not strings or not all(strings):
            raise ValueError("at least one is needed, and none may be empty")
        vocabulary = _vocabulary(tokenizer)
        self._texts = vocabulary.texts
        self._stops = StopStringCriteria._get_stop_strings_for_matching(tuple(strings), vocabulary.mode)
        self._max_tokens = max(map(len, self._stops))  # one character or byte each, at least
        if not any(map(vocabulary.can_end, self._stops)):
            raise ValueError("no token of the tokenizer ends with a part of one of them")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether its last token completes a stop string.  -> [batch] bool"""
        is_complete = [self.ends(row) for row in input_ids[:, -self._max_tokens :].tolist()]
        return torch.tensor(is_complete, device=input_ids.device)

    def ends(self, tokens: list[int]) -> bool:
        """Return whether the last of the tokens completes a stop string."""
        texts: list[Text] = []
        for token in reversed(tokens[-self._max_tokens :]):
            if (text := self._texts.get(token)) is None:  # such as padding of the vocabulary: no match goes across it
                break
            texts.append(text)
        if not texts:
            return False
        before = sum(map(len, texts[1:]))
        joined = texts[0][:0].join(reversed(texts))
        # A match must end inside of the last token.
        return any(joined.find(stop, max(before - len(stop) + 1, 0)) >= 0 for stop in self._stops)
