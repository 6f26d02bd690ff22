"""Drafting with an assistant model whose tokenizer differs from the target's.

``translation.py`` translates the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_slospec.drafters.assistant import (
    AssistantDrafter,
    AssistantMethod,
    check_device,
    check_encoder,
)
from hf_slospec.drafters.checkpoint import LOADING_ERRORS
from hf_slospec.drafters.level import Scores, Vocabulary
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.interfaces import Drafter
from hf_slospec.heads.translation import DraftTokens, TokenTranslation
from hf_slospec.model.kept_prefixes import RequestTokens
from hf_slospec.model.loading import check_vocabulary_of
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import vocab_size
from hf_slospec.request.request import Request


@dataclass(frozen=True, eq=False)
class TranslatedNetwork:
    """Adapter through which beam search runs an assistant model with another tokenizer; it
    translates token ids in both directions. See :class:`Network`.
    """

    translation: TokenTranslation
    device: torch.device

    @property
    def vocabulary(self) -> Vocabulary:
        """Tokens that the vocabularies of target and assistant have in common."""
        return self.translation.to(self.device)[0]

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {"input_ids": self.translation.to(self.device)[2][tokens][None]}

    def scores(self, outputs: torch.Tensor) -> Scores:
        """Return the logits of the common tokens.  [..., assistant_vocab] -> [..., num_common]"""
        return Scores(outputs[..., self.translation.to(self.device)[1]])


class TranslatedDrafter(AssistantDrafter):
    """Drafts by beam search with an assistant model that processes translated tokens.

    It caches K/V of the translated tokens and proposes only tokens that both vocabularies have. A
    request whose translated tokens do not fit into ``max_slots`` gets a tree of a root only.
    """

    def __init__(self, packed: PackedModel, room: Room, translation: TokenTranslation):
        super().__init__(packed, room, TranslatedNetwork(translation, packed.device))
        self.translation = translation
        self._translated = dict[Request, DraftTokens]()

    def _tokens_of(self, request: Request) -> DraftTokens:
        """Translate the request's new tokens; drop K/V of translated tokens that have changed."""
        draft_tokens = self._translated.setdefault(request, DraftTokens(self.translation, request))
        num_same = draft_tokens.update()
        if self.sequences.num_cached(draft_tokens) > num_same:
            self.sequences.of(draft_tokens).truncate(num_same)
        return draft_tokens

    def _with_room(self, requests: Sequence[Request]) -> dict[Request, RequestTokens]:
        by_request: dict[Request, RequestTokens] = {r: self._tokens_of(r) for r in requests}
        try:
            self.sequences.reserve(list(by_request.values()))
        except MemoryError:
            have_room = dict[Request, RequestTokens]()
            for request, draft_tokens in by_request.items():
                with suppress(MemoryError):
                    self.sequences.reserve([*have_room.values(), draft_tokens])
                    have_room[request] = draft_tokens
            return have_room
        return by_request

    def reuse(self, request: Request) -> int:
        """Take over K/V of a common prefix; return an estimate of the number of the request's
        tokens that it covers, as K/V is counted in translated tokens.
        """
        if self.sequences.max_kept is None:
            return 0
        draft_tokens = self._tokens_of(request)
        return self.sequences.reuse(draft_tokens) * len(request.tokens) // len(draft_tokens.tokens)

    def release(self, request: Request) -> None:
        if (draft_tokens := self._translated.pop(request, None)) is not None:
            self.sequences.release(draft_tokens)

    def close(self) -> None:
        super().close()
        self._translated.clear()


@dataclass(frozen=True, repr=False)
class TranslatedMethod(AssistantMethod):
    """Drafting method of an assistant model whose tokenizer differs from the target's."""

    translation: TokenTranslation

    kind = "assistant model with another tokenizer"

    def check(self, target: Any) -> None:
        check_device(self.assistant, target)
        check_encoder(self.assistant, target)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        return TranslatedDrafter(draft, room, self.translation)


def translated_method(
    model: Any, target: Any, tokenizer: Any, assistant_tokenizer: Any
) -> DraftMethod | None:
    """Return the drafting method with translation if the two vocabularies differ.

    Args:
        model: the assistant model.
        target: the target model.
        tokenizer: the target's tokenizer; None: load it from where the target was loaded.
        assistant_tokenizer: the assistant's tokenizer, or the folder or repository to load it from.

    Returns:
        None if the vocabularies are equal or one of the tokenizers is not available.
    """
    if (draft_tokenizer := _tokenizer(assistant_tokenizer)) is None:
        return None
    target_tokenizer = _tokenizer(target.config.name_or_path) if tokenizer is None else tokenizer
    if target_tokenizer is None:
        return None
    check_vocabulary_of("tokenizer", target_tokenizer)
    check_vocabulary_of("assistant_tokenizer", draft_tokenizer)
    if draft_tokenizer.get_vocab() == target_tokenizer.get_vocab():
        return None
    sizes = vocab_size(target), vocab_size(model)
    return TranslatedMethod(model, TokenTranslation(target_tokenizer, draft_tokenizer, *sizes))


def _tokenizer(source: PreTrainedTokenizerBase | str | None) -> PreTrainedTokenizerBase | None:
    if not isinstance(source, str):
        return source
    if not source:  # a model that was built from a config has an empty name_or_path
        return None
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except LOADING_ERRORS:  # there is no tokenizer in the folder or repository
        return None
    return loaded
