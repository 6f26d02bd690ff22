"""Text of growing lists of tokens: decoded step by step, and cut at stop strings of the output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_slospec.forks import cached_property

ToText = Callable[[list[int]], str]
INVALID = "\ufffd"  # in place of bytes that are no UTF-8, such as part of a character
# Last tokens of a prompt that are tried as context before the whole prompt.
CONTEXT_SIZES = (8, 64, 1024)
# clean_up_tokenization changes no text up to the end of such a word.
WORD = re.compile(r".*\w{4}", re.DOTALL)


BYTES_BY_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}  # of byte-level tokens
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # byte tokens of sentencepiece vocabularies


def bytes_of(token: str, is_byte_level: bool) -> bytes:
    """Return the text of a token of a byte-level or sentencepiece vocabulary."""
    if is_byte_level:
        is_bytes = all(char in BYTES_BY_CHAR for char in token)
        return bytes(BYTES_BY_CHAR[char] for char in token) if is_bytes else token.encode()
    if (byte := BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()


class Detokenizer:
    """Text of token ids, and how the text of a token depends on the tokens around it."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._bytes: dict[int, bytes] = {}

    def __call__(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        return text

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """Byte tokens of a sentencepiece vocabulary; a run that is no UTF-8 as a whole is replaced
        as a whole.
        """
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            return frozenset()
        numbers: Any = self._tokenizer.convert_tokens_to_ids(
            [f"<0x{byte:02X}>" for byte in range(256)]
        )
        return frozenset(numbers) - {self._tokenizer.unk_token_id, None}

    @cached_property
    def cleans_up(self) -> bool:
        """Return True if transformers' clean_up_tokenization changes the decoded text."""
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
            return False
        is_bpe = (
            type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
            == "BPE"
        )
        return (
            not is_bpe
            or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
            is True
        )

    def skipped(self, token: int) -> str:
        """Return the text of a special token that is left out; empty for other tokens."""
        text: str = "" if self([token]) else self._tokenizer.decode([token])
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token behind another one; part of a character if the token
        is.
        """
        if token not in self._bytes:
            self._bytes[token] = self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> bytes:
        before = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        text: str = self._tokenizer.decode([*before, token]).removeprefix(
            self._tokenizer.decode(before)
        )
        if INVALID not in text:
            return text.encode()
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        return bytes_of(name, is_byte_level=BYTE_TOKEN.fullmatch(name) is None)


class TextStream:
    """Incremental detokenization: returns text as soon as no further token can change it.

    The pieces join to the text of all tokens, however the tokens are split into steps.
    """

    def __init__(self, to_text: ToText, prompt: Sequence[int] = ()):
        """``prompt``: tokens before the first one; their text is not returned, but the first
        token's depends on it.
        """
        self._to_text = to_text
        self.held = ""  # text of the tokens so far that further tokens may change
        self._byte_tokens = frozenset[int]()
        self._cleans_up = False
        if isinstance(to_text, Detokenizer):
            self._byte_tokens = to_text.byte_tokens
            self._cleans_up = to_text.cleans_up
        # Decoded at every step; the first ones for context only.
        self._tokens = self._context(prompt)
        self._num_context = len(self._tokens)
        # Characters.
        self._num_returned = len(to_text(self._tokens).rstrip(INVALID)) if self._tokens else 0

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that suffice to decode what follows as behind the
        whole prompt.
        """
        for tail in (list(prompt[-size:]) for size in CONTEXT_SIZES if size < len(prompt)):
            text = self._to_text(tail)
            if text and INVALID not in text and not self._is_byte(tail):
                return tail
        return list(prompt)

    def push(self, tokens: Sequence[int], is_last: bool) -> str:
        """Add tokens and return the text that they complete."""
        self._tokens += tokens
        text = self._to_text(self._tokens)
        final = len(text) if is_last else self._num_final(text)
        piece = text[self._num_returned : final]
        self.held = text[max(self._num_returned, final) :]
        self._num_returned = max(self._num_returned, final)
        after = self._tokens[self._num_context :]
        # Tokens without text, such as special ones, give none.
        if not self.held and (context := self._to_text(after)):
            self._tokens = after
            self._num_context = len(after)
            self._num_returned = len(context)
        return piece

    def _num_final(self, text: str) -> int:
        """Return the number of characters that no further token changes."""
        if self._is_byte(reversed(self._tokens)):
            return self._num_returned
        if self._cleans_up:
            word = WORD.match(text)
            text = "" if word is None else word[0]
        return len(text.rstrip(INVALID))

    def _is_byte(self, tokens: Iterable[int]) -> bool:
        """Return True if the first token is a byte token, but for those without text."""
        if not self._byte_tokens:
            return False
        return (
            next((token for token in tokens if self._to_text([token])), None) in self._byte_tokens
        )


class StoppedText:
    """Text of an output, cut at the stop string that is complete first."""

    def __init__(
        self,
        to_text: ToText,
        stop_strings: Sequence[str],
        keeps_stop: bool = False,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        """Prepare the text of an output without tokens.

        Args:
            keeps_stop: the stop string is part of the text.
            prompt: tokens before the output, in which no stop string is searched for.
            min_tokens: number of first tokens that complete no stop string.
        """
        self._stream = TextStream(to_text, prompt)
        self._stop_strings = stop_strings
        self._keeps_stop = keeps_stop
        self._skipped = (
            to_text.skipped
            if isinstance(to_text, Detokenizer) and stop_strings
            else lambda token: ""
        )
        self._min_tokens = min_tokens
        self._begin = 0  # no stop string ends in the text before
        self._held = ""  # text that may be the beginning of a stop string
        self.stop_string: str | None = None  # the one at which the text was cut

    def push(self, tokens: Sequence[int], is_last: bool) -> str:
        """Add tokens and return the text that is certain to be part of the output."""
        if self.stop_string is not None:
            return ""
        first = tokens[: self._min_tokens]
        tokens = tokens[self._min_tokens :]
        if first:
            self._min_tokens -= len(first)
            self._held += self._stream.push(first, False)
            self._begin = len((self._held + self._stream.held).rstrip(INVALID))
        text = self._held + self._stream.push(tokens, is_last)
        searched = text + self._stream.held
        begins = {
            stop: searched.find(stop, max(self._begin - len(stop) + 1, 0))
            for stop in self._stop_strings
        }
        # A special token that is not shown may be a stop string, or the end of one.
        if special := self._skipped(tokens[-1]) if tokens else "":
            searched += special
            ends = [
                stop
                for stop in self._stop_strings
                if stop.endswith(special) and searched.endswith(stop)
            ]
            begins |= {stop: len(searched) - len(stop) for stop in ends}
        if matches := [
            (begin + len(stop), begin, stop) for stop, begin in begins.items() if begin >= 0
        ]:
            end, begin, self.stop_string = min(matches)
            return searched[: end if self._keeps_stop else begin]
        held = (
            0 if is_last else max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        )
        certain = text[: len(text) - held]
        self._held = text[len(text) - held :]
        self._begin = max(self._begin - len(certain), 0)
        return certain


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )


class OutputStopStrings:
    """Stopping criterion of one request, met at the first token of the output that completes a stop
    string in its text.

    ``StopStringCriteria`` also finds stop strings that begin in the prompt.
    """

    per_row = True

    def __init__(
        self,
        to_text: ToText,
        stop_strings: str | Sequence[str],
        prompt_len: int,
        min_tokens: int = 0,
    ):
        """Prepare the search.

        Args:
            min_tokens: number of first tokens of the output that complete no stop string.

        Raises:
            ValueError: there is no stop string, or one is empty or no text.
        """
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if not strings or not all(isinstance(stop, str) and stop for stop in strings):
            raise ValueError("at least one is needed, and none may be empty")
        self._to_text = to_text
        self._strings = strings
        self._min_tokens = min_tokens
        self._num_seen = prompt_len
        self._text: StoppedText | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether the last token completes a stop string.  -> [1] bool"""
        if self._text is None:
            prompt = input_ids[0, : self._num_seen].tolist()
            self._text = StoppedText(
                self._to_text, self._strings, prompt=prompt, min_tokens=self._min_tokens
            )
        new = input_ids[0, self._num_seen :].tolist()
        self._num_seen += len(new)
        self._text.push(new, False)
        return torch.tensor([self._text.stop_string is not None], device=input_ids.device)
