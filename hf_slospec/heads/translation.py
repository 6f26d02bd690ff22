"""Translation of a target's tokens to those of a draft that has another tokenizer."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_slospec.batcher.texts import BYTE_TOKEN, bytes_of
from hf_slospec.drafters.level import Vocabulary
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.model.kept_prefixes import num_common
from hf_slospec.request.request import Request

WINDOW = (
    10  # tokens before new ones that are tokenized again, and as many more before these as context
)
MAX_CUTS = 64  # maximum number of cuts kept per request; the last ones
MIN_COMMON = 0.01  # share of the smaller vocabulary that both must have
MAX_PIECE = 8  # maximum bytes of a token that is looked up by its bytes, beside invalid UTF-8
ROLES = ("bos_token_id", "eos_token_id")
INVALID = re.compile(r"([\udc80-\udcff]+)")  # invalid UTF-8, as the error handler below decodes it
KEEP_INVALID = "surrogateescape"

Key = bytes | str  # a token's meaning: the bytes of its text, or the name of a special token


class TokenTexts:
    """Texts of one tokenizer's tokens, and tokenization without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._backend: Any | None = None  # of a tokenizer that is not written in Python
        if tokenizer.is_fast:
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_padding()
            self._backend.no_truncation()
            self._backend.encode_special_tokens = True  # a special token's name in a text is text
        added = tokenizer.added_tokens_decoder
        self.special = {
            *tokenizer.all_special_ids,
            *(number for number, token in added.items() if token.special),
        }
        vocab: dict[str, int] = tokenizer.get_vocab()
        first = Counter(token[:1] for token in vocab)
        is_byte_level = first["Ġ"] > first["▁"]
        self.keys: dict[int, Key] = {}
        ranks: dict[
            int, int
        ] = {}  # among tokens of equal text, tokenizers use that of the highest rank
        for token, number in vocab.items():
            if number in self.special:
                self.keys[number] = token
            else:
                self.keys[number] = (
                    token.encode() if number in added else bytes_of(token, is_byte_level)
                )
            ranks[number] = 2 if number in added else 0 if BYTE_TOKEN.fullmatch(token) else 1
        self.ids = {
            self.keys[number]: number
            for number in sorted(self.keys, key=lambda token: (ranks[token], token))
        }

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        return b"".join(self.texts(tokens))

    def texts(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the text of each token, empty for special and unknown ones."""
        keys = (self.keys.get(token, b"") for token in tokens)
        return [key if isinstance(key, bytes) else b"" for key in keys]

    def split(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens; invalid UTF-8 in it is escaped."""
        tokens = list[int]()
        for index, part in enumerate(filter(None, INVALID.split(text))):
            new = [] if INVALID.match(part) else self._split_valid(part)
            if INVALID.match(part) or (
                index and self.text(new) != part.encode()
            ):  # the tokenizer added a space
                new = self._split_bytes(part.encode(errors=KEEP_INVALID))
            tokens += new
        return tokens

    def _split_valid(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _split_bytes(self, data: bytes) -> list[int]:
        """Return the longest tokens of bytes, from the left; bytes without a token are skipped."""
        tokens = list[int]()
        while data:
            length = next((size for size in range(MAX_PIECE, 0, -1) if data[:size] in self.ids), 0)
            if length:
                tokens.append(self.ids[data[:length]])
            data = data[max(length, 1) :]
        return tokens


class Cut(NamedTuple):
    """A point of a text where tokens of both vocabularies begin."""

    target: int  # number of the target's tokens before it
    draft: int  # number of the draft's tokens before it


class Stretch(NamedTuple):
    """Consecutive tokens of the target, translated to tokens of the draft."""

    tokens: list[int]  # ids of the draft
    cuts: list[Cut]  # in ascending order; the first one is the start of the stretch


class TokenTranslation:
    """Tokens that two vocabularies have in common, and the translation from one to the other.

    Tokens are common if they have the same bytes, however the vocabularies write spaces and bytes,
    or if they are special tokens of the same name or role (bos, eos). Drafts propose common tokens
    only: token-level intersection (Timor et al., arXiv 2502.05202).
    """

    def __init__(
        self,
        target_tokenizer: PreTrainedTokenizerBase,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_vocab_size: int,
        draft_vocab_size: int,
    ):
        """Compare the vocabularies.

        Args:
            target_tokenizer: the target's.
            draft_tokenizer: the draft's.
            target_vocab_size: tokens of the target model; its tokenizer may have more or fewer.
            draft_vocab_size: tokens of the draft model.

        Raises:
            IncompatibleDraftError: the vocabularies have too few tokens in common.
        """
        self.target = TokenTexts(target_tokenizer)
        self.draft = TokenTexts(draft_tokenizer)
        ids = {
            key: number
            for key, number in self.draft.ids.items()
            if number < draft_vocab_size and key
        }
        # Draft ids by the target's ids, several of which may have the same text.
        self._same = {number: ids[key] for number, key in self.target.keys.items() if key in ids}
        for role in ROLES:
            target_id = getattr(target_tokenizer, role)
            draft_id = getattr(draft_tokenizer, role)
            if target_id is not None and draft_id is not None and draft_id < draft_vocab_size:
                self._same.setdefault(target_id, draft_id)
        common = sorted(
            number
            for number in self._same
            if number < target_vocab_size
            and self.target.ids.get(self.target.keys.get(number, "")) == number
        )
        num_text = sum(number not in self.target.special for number in common)
        sizes = len(self.target.ids), len(self.draft.ids)
        if num_text < max(1, MIN_COMMON * min(sizes)):
            raise IncompatibleDraftError(
                f"the tokenizers of target and draft have {num_text} tokens in common, of {sizes[0]} and {sizes[1]}; "
                "use a draft whose vocabulary is more like the target's"
            )
        self.target_ids = torch.tensor(common, device="cpu")  # [num_common] int64, ascending
        self.draft_ids = torch.tensor(
            [self._same[number] for number in common], device="cpu"
        )  # [num_common] int64
        self.draft_id_of = torch.zeros(
            target_vocab_size, dtype=torch.int64, device="cpu"
        )  # [target_vocab], 0 if not common
        self.draft_id_of[self.target_ids] = self.draft_ids
        self._by_device = dict[torch.device, tuple[Vocabulary, torch.Tensor, torch.Tensor]]()
        self._with_role = {getattr(target_tokenizer, role) for role in (*ROLES, "pad_token_id")}
        self._special = {number: self._translated_special(number) for number in self.target.special}
        self._adds_space = self.target.text(self.target.split("x")[:1]).startswith(b" ")
        bos = draft_tokenizer.bos_token_id
        begins_with_bos = bos is not None and draft_tokenizer("")["input_ids"][:1] == [bos]
        self._prefix = [bos] if begins_with_bos else []
        self.filler = (
            int(self.draft_ids[0]) if bos is None else bos
        )  # the only token of an empty translation

    def to(self, device: torch.device) -> tuple[Vocabulary, torch.Tensor, torch.Tensor]:
        """Return the tensors on a device; they keep their addresses, as CUDA graphs read them.

        Returns:
            The target's ids of common tokens, the draft's ids of them [num_common] int64, and the
            draft's id of each token of the target [target_vocab] int64.
        """
        if device not in self._by_device:
            vocabulary = Vocabulary(self.target_ids.to(device), len(self.draft_id_of))
            self._by_device[device] = (
                vocabulary,
                self.draft_ids.to(device),
                self.draft_id_of.to(device),
            )
        return self._by_device[device]

    def translate(self, tokens: Sequence[int], is_begin: bool = True) -> Stretch:
        """Return the draft's tokens for some of the target's; ``is_begin``: the text begins with
        them.
        """
        parts = list(self._parts(tokens, is_begin))
        has_bos = bool(parts) and parts[0][1][:1] == self._prefix
        translated = [] if has_bos or not is_begin else list(self._prefix)
        num_done = 0
        cuts = [Cut(0, 0)]
        for part, part_translated in parts:
            part_cuts = self._cuts(part, part_translated)
            cuts += [Cut(num_done + cut.target, len(translated) + cut.draft) for cut in part_cuts]
            num_done += len(part)
            translated += part_translated
        return Stretch(translated, cuts)

    def _parts(
        self, tokens: Sequence[int], is_begin: bool
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each special token and each run of other tokens with its translation."""
        for is_special, group in groupby(tokens, self._special.__contains__):
            if is_special:
                yield from (([token], self._special[token]) for token in group)
            else:
                run = list(group)
                yield run, self._translated_run(run, is_begin)
            is_begin = is_special

    def _translated_run(self, tokens: Sequence[int], is_begin: bool) -> list[int]:
        """Return the translation of tokens that are not special; ``is_begin``: the text begins with
        them.

        If both tokenizers split the text alike, the translation is token by token. Otherwise the
        draft's tokenizer splits the text.
        """
        text = self.target.text(tokens).decode(errors=KEEP_INVALID)
        if is_begin and self._adds_space:
            text = text.removeprefix(" ")
        split = self.draft.split(text)
        same = [self._same.get(token) for token in tokens]
        if None in same or split == same:
            return split
        is_alike = split == [self._same.get(token) for token in self.target.split(text)]
        return [token for token in same if token is not None] if is_alike else split

    def _translated_special(self, token: int) -> list[int]:
        """Return the draft's tokens for a special token: the same one, or its name unless it has a
        role.
        """
        name = str(self.target.keys.get(token, ""))
        if token in self._same:
            return [self._same[token]]
        if name.encode() in self.draft.ids:
            return [self.draft.ids[name.encode()]]
        return [] if token in self._with_role else self.draft.split(name)

    def _cuts(self, tokens: Sequence[int], translated: Sequence[int]) -> list[Cut]:
        """Return the points where tokens of both begin, between characters; the last one is the
        end.

        Points are compared by the bytes after them, as far as these agree: a tokenizer may begin
        with a space, or normalise characters.
        """
        texts = self.target.texts(tokens), self.draft.texts(translated)
        target, draft = (
            np.frombuffer(b"".join(text), dtype=np.uint8) for text in texts
        )  # [num_bytes] each
        shorter = min(len(target), len(draft))
        differs = np.flatnonzero(target[len(target) - shorter :] != draft[len(draft) - shorter :])
        num_same = shorter if not len(differs) else shorter - 1 - int(differs[-1])
        target_left, draft_left = (
            np.cumsum([0, *map(len, text[::-1])])[::-1] for text in texts
        )  # bytes left
        common, *indices = np.intersect1d(target_left, draft_left, return_indices=True)
        is_cut = (common > 0) & (common <= num_same)
        is_cut[is_cut] &= (
            target[len(target) - common[is_cut]] & 0xC0 != 0x80
        )  # not within a character
        cuts = [
            Cut(*pair) for pair in zip(*(index[is_cut].tolist() for index in indices), strict=True)
        ]
        return [*cuts[::-1], Cut(len(tokens), len(translated))]


class DraftTokens:
    """A request's tokens, translated for its draft."""

    def __init__(self, translation: TokenTranslation, request: Request):
        self._translation = translation
        self._request = request
        self.params = replace(
            request.params, prompt=(), num_padding=0
        )  # these matter for the target only
        self.tokens = list[int]()
        self._num_seen = 0
        self._cuts = [Cut(0, 0)]  # in ascending order

    @property
    def num_left(self) -> int:
        """Number of tokens that the request may still emit; translated, they may be more or fewer."""
        return self._request.num_left

    @property
    def error(self) -> BaseException | None:
        """Error that ended the request."""
        return self._request.error

    def update(self) -> int:
        """Translate tokens that were committed since the last call; return how many leading tokens
        are unchanged.

        The last tokens are tokenized again with the new ones and with context before them, as
        tokenizers split the begin of a text differently.
        """
        committed = self._request.tokens
        if self._num_seen == len(committed):
            return len(self.tokens)
        anchor = self._last_cut(self._num_seen - WINDOW)
        context = self._last_cut(anchor.target - WINDOW)
        stretch = self._translation.translate(committed[context.target :], not context.target)
        after = next(
            (cut.draft for cut in stretch.cuts if context.target + cut.target == anchor.target),
            None,
        )
        if after is None:  # the new tokens have changed those around the cut
            anchor = context = Cut(0, 0)
            stretch = self._translation.translate(committed)
            after = 0
        old = self.tokens[anchor.draft :]
        new = stretch.tokens[after:]
        self.tokens = self.tokens[: anchor.draft] + new or [self._translation.filler]
        moved = [
            Cut(context.target + cut.target, anchor.draft + cut.draft - after)
            for cut in stretch.cuts
        ]
        self._cuts = [cut for cut in self._cuts if cut.target <= anchor.target]
        self._cuts = (self._cuts + [cut for cut in moved if cut.target > anchor.target])[-MAX_CUTS:]
        self._num_seen = len(committed)
        return anchor.draft + num_common(old, new)

    def _last_cut(self, num_tokens: int) -> Cut:
        """Return the last cut behind at most ``num_tokens`` of the target's tokens; the start if
        none is kept.
        """
        return next((cut for cut in reversed(self._cuts) if cut.target <= num_tokens), Cut(0, 0))
