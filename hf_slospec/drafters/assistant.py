"""Drafting with an assistant model, by a beam search of all requests at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.drafters.beam import beam_search
from hf_slospec.drafters.level import Beam, Level, Scores, Vocabulary
from hf_slospec.drafters.translation import DraftTokens, TokenTranslation
from hf_slospec.engine.costs import MAX_CATCH_UP
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.inspection.properties import evaluating
from hf_slospec.models.packed.model import PackedModel
from hf_slospec.models.packed.new_tokens import draft_nodes
from hf_slospec.models.sequences.request_sequences import RequestSequences
from hf_slospec.models.sequences.room import RequestTokens


@dataclass(frozen=True, eq=False)
class AssistantNetwork:
    """Inputs and outputs of an assistant model (:class:`Network`)."""

    vocab_size: int  # the target's; either vocabulary may be padded further than the other
    device: torch.device
    translation: TokenTranslation | None = None

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Tokens that both vocabularies have; None: the draft's are the target's."""
        return None if self.translation is None else self.translation.to(self.device)[0]

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the draft's ids, [1, num_tokens] int64."""
        ids = tokens if self.translation is None else self.translation.to(self.device)[2][tokens]
        return {"input_ids": ids[None]}

    def scores(self, found: torch.Tensor) -> Scores:
        """Return logits of the ids that both models have.  [..., vocab] -> [..., draft_vocab]"""
        if self.translation is None:
            return Scores(found[..., : self.vocab_size])
        return Scores(found[..., self.translation.to(self.device)[1]])


class AssistantDrafter(Drafter):
    """Beam search on the draft model's probabilities, coupled to the noise of sampled requests.

    Its candidate trees hold every beam node. The draft's K/V cache holds committed tokens only: a call first processes
    every token that lacks K/V, be it the whole prompt, a stretch decoded without drafting, or the last step's tokens.
    Long stretches are processed over several steps, so that a long prompt does not stall other requests; until a
    request has caught up, its trees are roots.

    A draft with another tokenizer has texts of its own (:class:`DraftTokens`), and the K/V of their tokens. It proposes
    the tokens that both vocabularies have.
    """

    CATCH_UP = 1024  # tokens processed per step at most, over all requests that lack more than FEW
    FEW = MAX_CATCH_UP

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        vocab_size: int,
        max_slots: int | None = None,
        max_kept: float = 0,
        translation: TokenTranslation | None = None,
    ):
        """``max_nodes`` bounds depth times width of plans, ``vocab_size`` the proposed ids.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`. ``translation``: the draft has another
        tokenizer. A text may then be longer for it than for the target; where ``max_slots`` are too few, trees are
        roots.
        """
        self.packed, self.network = packed, AssistantNetwork(vocab_size, packed.device, translation)
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)
        self.translation, self._texts = translation, dict[Request, DraftTokens]()

    @property
    def num_one_off_forwards(self) -> int:
        return self.packed.num_one_off_forwards

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with as_memory_error(), evaluating(self.packed.model):
            return self._trees_of(requests, plan)

    def _trees_of(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        texts = self._with_room({request: self._text_of(request) for request in requests})
        for text in texts.values():  # after a step that was undone the root may be cached; its logits are wanted again
            self.sequences.of(text).truncate(len(text.tokens) - 1)
        ready = self._catch_up(texts)
        trees = dict(zip(ready, self._draft(ready, plan) if ready else [], strict=True))
        return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _text_of(self, request: Request) -> RequestTokens:
        """Return a request's text in the draft's tokens, of which those that have changed lose their K/V."""
        if self.translation is None:
            return request
        text = self._texts.setdefault(request, DraftTokens(self.translation, request))
        num_same = text.update()
        if self.sequences.num_cached(text) > num_same:
            self.sequences.of(text).truncate(num_same)
        return text

    def _with_room(self, texts: Mapping[Request, RequestTokens]) -> dict[Request, RequestTokens]:
        """Make room for one more step, and return the texts that have it: all but translated ones that are too long."""
        try:
            self.sequences.reserve(list(texts.values()))
        except MemoryError:
            if self.translation is None:
                raise
        else:
            return dict(texts)
        have_room = dict[Request, RequestTokens]()
        for request, text in texts.items():
            with suppress(MemoryError):
                self.sequences.reserve([text])
                have_room[request] = text
        return have_room

    def _catch_up(self, texts: Mapping[Request, RequestTokens]) -> dict[Request, RequestTokens]:
        """Return the requests that can draft now, after processing as many tokens of others as a step may."""
        ready, left = dict[Request, RequestTokens](), self.CATCH_UP
        for request, text in texts.items():
            behind = len(self.sequences.uncached(text))
            if behind <= self.FEW:
                ready[request] = text
            elif behind <= left:
                ready[request] = text
                left -= behind
            elif left:
                self.sequences.prefill(text, left)
                left = 0
        return ready

    def _draft(self, texts: Mapping[Request, RequestTokens], plan: Plan) -> list[TokenTree]:
        run, rows = partial(self._run, list(texts.values())), self.packed.num_draft_rows(len(texts))
        return beam_search(list(texts), plan, self.network, run, self.packed.device, rows)

    def reuse(self, request: Request) -> int:
        """Give a request that has no K/V that of a text which begins alike; return its tokens with K/V.

        A translated text has other tokens, so that their number is estimated.
        """
        if not self.sequences.max_kept:
            return 0
        text = self._text_of(request)
        return self.sequences.reuse(text) * len(request.tokens) // len(text.tokens)

    def release(self, request: Request) -> None:
        self.sequences.release(self._texts.pop(request, request))

    def relieve(self) -> bool:
        """Free the K/V of all requests, which only saves time; return whether there was any."""
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        """Release all requests and the model's K/V cache."""
        self.sequences.close()
        self._texts.clear()

    def _run(self, texts: Sequence[RequestTokens], level: Level) -> Beam | Scores:
        """Forward the last layer of the beam; of the roots, with all committed tokens that lack K/V."""
        sequences = [self.sequences.of(text) for text in texts]
        if not level.is_root:
            places = [len(text.tokens) - 1 for text in texts]
            parts = draft_nodes(self.packed, sequences, places, level.sizes)
            below: Beam | Scores = self.sequences.draft(parts, torch.arange(len(texts) * level.beam), level)
            return below
        tails = [self.sequences.uncached(text) for text in texts]
        parts = [self.sequences.chain(text, tail) for text, tail in zip(texts, tails, strict=True)]
        last_rows = np.cumsum([len(tail) for tail in tails]) - 1
        found: Beam | Scores = self.sequences.draft(parts, torch.from_numpy(last_rows), level)
        for sequence, text in zip(sequences, texts, strict=True):
            sequence.length = len(text.tokens)
        return found
