"""Translation of the target's tokens to the tokens of a draft model with another tokenizer.

``translated.py`` drafts with it.
"""

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

# Number of target tokens before new ones that are translated again with them, as new text may
# change how a tokenizer splits the text before it. As many more are tokenized as context only.
WINDOW = 10
MAX_CUTS = 64  # number of most recent cuts (see Cut) that are kept per request
MIN_COMMON = 0.01  # least share of the smaller vocabulary that the other one must contain
# Longest token, in bytes, that is tried when bytes are looked up without the tokenizer.
MAX_PIECE = 8
ROLES = ("bos_token_id", "eos_token_id")  # special tokens that are common whatever their names
# KEEP_INVALID: codec error handler that decodes invalid UTF-8 bytes to lone surrogates, which
# INVALID matches.
INVALID = re.compile(r"([\udc80-\udcff]+)")
KEEP_INVALID = "surrogateescape"

# Key by which tokens of two vocabularies are compared: the bytes of a token's text, or the name of
# a special token.
Key = bytes | str


class TokenTexts:
    """Bytes that each token of a tokenizer stands for, and tokenization without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._backend: Any | None = None  # copy of a fast tokenizer's backend
        if tokenizer.is_fast:
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_padding()
            self._backend.no_truncation()
            # The name of a special token in a text is split like other text.
            self._backend.encode_special_tokens = True
        added = tokenizer.added_tokens_decoder
        self.special = {
            *tokenizer.all_special_ids,
            *(number for number, token in added.items() if token.special),
        }
        vocab: dict[str, int] = tokenizer.get_vocab()
        first = Counter(token[:1] for token in vocab)
        is_byte_level = first["Ġ"] > first["▁"]
        self.keys: dict[int, Key] = {}
        # Of several tokens with the same text, tokenizers use an added token before an ordinary
        # one, and that before a byte token (such as <0x0A>).
        ranks: dict[int, int] = {}
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
        """Return the bytes of the tokens' text; special and unknown tokens have none."""
        return b"".join(self.texts(tokens))

    def texts(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token's text, empty for special and unknown tokens."""
        keys = (self.keys.get(token, b"") for token in tokens)
        return [key if isinstance(key, bytes) else b"" for key in keys]

    def split(self, text: str) -> list[int]:
        """Split a text into tokens, without adding special tokens.

        Args:
            text: decoded with the error handler ``KEEP_INVALID``, so it may hold lone surrogates.
        """
        tokens = list[int]()
        for index, part in enumerate(filter(None, INVALID.split(text))):
            new = [] if INVALID.match(part) else self._split_valid(part)
            # Bytes are looked up where the tokenizer cannot split the part: it is invalid UTF-8, or
            # the tokenizer took it for the start of a text and added a space.
            if INVALID.match(part) or (index and self.text(new) != part.encode()):
                new = self._split_bytes(part.encode(errors=KEEP_INVALID))
            tokens += new
        return tokens

    def _split_valid(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _split_bytes(self, data: bytes) -> list[int]:
        """Split bytes greedily into the longest tokens of at most ``MAX_PIECE`` bytes; bytes that
        begin no token are skipped.
        """
        tokens = list[int]()
        while data:
            length = next((size for size in range(MAX_PIECE, 0, -1) if data[:size] in self.ids), 0)
            if length:
                tokens.append(self.ids[data[:length]])
            data = data[max(length, 1) :]
        return tokens


class Cut(NamedTuple):
    """Point between characters of a text where both tokenizations have a token boundary."""

    target: int  # number of target tokens before the point
    draft: int  # number of draft tokens before the point


class Stretch(NamedTuple):
    """Translation of consecutive target tokens."""

    tokens: list[int]  # ids of the draft model
    cuts: list[Cut]  # in ascending order, numbers counted from the first cut, the stretch's start


class TokenTranslation:
    """Tokens that the vocabularies of target and draft model have in common, and the translation of
    target tokens to draft tokens.

    Two tokens are common if they stand for the same bytes, however the vocabularies write spaces
    and bytes, or if they are special tokens of the same name or role (bos, eos). Only common tokens
    are proposed: token-level intersection (Timor et al., arXiv 2502.05202).
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
            target_tokenizer: the target's tokenizer.
            draft_tokenizer: the draft model's tokenizer.
            target_vocab_size: number of the target's logits; its tokenizer may have more or fewer
                tokens.
            draft_vocab_size: number of the draft model's logits.

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
        # Target id -> draft id; several target tokens may have the same text, hence the same id.
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
        # [num_common] int64, the draft ids of target_ids
        self.draft_ids = torch.tensor([self._same[number] for number in common], device="cpu")
        # [target_vocab] int64, draft id by target id; 0 for tokens that are not common
        self.draft_id_of = torch.zeros(target_vocab_size, dtype=torch.int64, device="cpu")
        self.draft_id_of[self.target_ids] = self.draft_ids
        self._by_device = dict[torch.device, tuple[Vocabulary, torch.Tensor, torch.Tensor]]()
        self._with_role = {getattr(target_tokenizer, role) for role in (*ROLES, "pad_token_id")}
        self._special = {number: self._translated_special(number) for number in self.target.special}
        self._adds_space = self.target.text(self.target.split("x")[:1]).startswith(b" ")
        bos = draft_tokenizer.bos_token_id
        begins_with_bos = bos is not None and draft_tokenizer("")["input_ids"][:1] == [bos]
        self._prefix = [bos] if begins_with_bos else []
        # Stands in for an empty translation, as a draft model needs at least one token.
        self.filler = int(self.draft_ids[0]) if bos is None else bos

    def to(self, device: torch.device) -> tuple[Vocabulary, torch.Tensor, torch.Tensor]:
        """Return the id tables on a device.

        Tables are made once per device, as CUDA graphs need tensors to keep their addresses.

        Returns:
            The target ids of common tokens as a :class:`Vocabulary`; the draft ids of common
            tokens, [num_common] int64; the draft id of each target token, [target_vocab] int64, 0
            for tokens that are not common.
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
        """Translate target tokens to draft tokens.

        At the start of the text, a bos token is prepended if the draft's tokenizer adds one.

        Args:
            tokens: consecutive target tokens.
            is_begin: the tokens are the start of the text.
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
        """Yield each special token, and each maximal run of other tokens, with its translation."""
        for is_special, group in groupby(tokens, self._special.__contains__):
            if is_special:
                yield from (([token], self._special[token]) for token in group)
            else:
                run = list(group)
                yield run, self._translated_run(run, is_begin)
            is_begin = is_special

    def _translated_run(self, tokens: Sequence[int], is_begin: bool) -> list[int]:
        """Translate tokens that are not special; ``is_begin``: they are the start of the text or
        follow a special token.

        They are translated one by one if both tokenizers split their text alike, even if the
        target's tokens are another split of it. Otherwise the draft's tokenizer splits the text.
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
        """Translate a special token to the common token, if there is one.

        Otherwise, its name is translated: to the draft token with that text, or else to several
        tokens. A token with a role (bos, eos, pad) is dropped instead of being split.
        """
        name = str(self.target.keys.get(token, ""))
        if token in self._same:
            return [self._same[token]]
        if name.encode() in self.draft.ids:
            return [self.draft.ids[name.encode()]]
        return [] if token in self._with_role else self.draft.split(name)

    def _cuts(self, tokens: Sequence[int], translated: Sequence[int]) -> list[Cut]:
        """Return the cuts within a run of tokens and its translation; the last one is their end.

        Token boundaries are matched by the number of bytes after them, as the start may differ by a
        space. If a tokenizer has normalised characters, boundaries before the last difference are
        not matched.
        """
        texts = self.target.texts(tokens), self.draft.texts(translated)
        target, draft = (
            np.frombuffer(b"".join(text), dtype=np.uint8) for text in texts
        )  # [num_bytes] each
        shorter = min(len(target), len(draft))
        differs = np.flatnonzero(target[len(target) - shorter :] != draft[len(draft) - shorter :])
        num_same = shorter if not len(differs) else shorter - 1 - int(differs[-1])
        # bytes from each token's start to the end of the run
        target_left, draft_left = (np.cumsum([0, *map(len, text[::-1])])[::-1] for text in texts)
        common, *indices = np.intersect1d(target_left, draft_left, return_indices=True)
        is_cut = (common > 0) & (common <= num_same)
        # UTF-8 continuation bytes (10xxxxxx) are inside a character.
        is_cut[is_cut] &= target[len(target) - common[is_cut]] & 0xC0 != 0x80
        cuts = [
            Cut(*pair) for pair in zip(*(index[is_cut].tolist() for index in indices), strict=True)
        ]
        return [*cuts[::-1], Cut(len(tokens), len(translated))]


class DraftTokens:
    """Translated tokens of one request, kept up to date as tokens are committed."""

    def __init__(self, translation: TokenTranslation, request: Request):
        self._translation = translation
        self._request = request
        # The prompt and its padding matter for the target only.
        self.params = replace(request.params, prompt=(), num_padding=0)
        self.tokens = list[int]()
        self._num_seen = 0
        self._cuts = [Cut(0, 0)]  # in ascending order

    @property
    def num_left(self) -> int:
        """Number of target tokens that the request may still emit, an estimate of the translated
        tokens to come.
        """
        return self._request.num_left

    @property
    def error(self) -> BaseException | None:
        """Error that ended the request."""
        return self._request.error

    def update(self) -> int:
        """Translate the tokens that were committed since the last call.

        The tokens from the last cut at least ``WINDOW`` tokens before the new ones are translated
        again. Context before that cut is tokenized with them and then discarded, as tokenizers
        split the beginning of a text differently.

        Returns:
            The number of leading translated tokens that are unchanged.
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
        # With the new text, the tokenizer no longer has a boundary at the cut: translate all.
        if after is None:
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
        """Return the last kept cut that has at most ``num_tokens`` target tokens before it; the
        start of the text if there is none.
        """
        return next((cut for cut in reversed(self._cuts) if cut.target <= num_tokens), Cut(0, 0))
