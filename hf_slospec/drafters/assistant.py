"""Drafting with an assistant model that has the target's tokenizer, by beam search of all requests
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_slospec.drafters.beam import beam_search
from hf_slospec.drafters.level import Level, Network, Scores, Vocabulary
from hf_slospec.drafters.methods import DraftMethod, PackedDrafter, Room, with_roots
from hf_slospec.engine.costs import MAX_CATCH_UP
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.model.kept_prefixes import RequestTokens, num_common
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import attends_to_encoder, evaluating, input_device, vocab_size
from hf_slospec.model.tree_mask import chain, draft_nodes
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray, TokenTree

# Maximum difference of vocabulary sizes, in token ids, that counts as padding of embedding tables
PADDING = 1024


@dataclass(frozen=True, eq=False)
class AssistantNetwork:
    """Inputs and outputs of an assistant model whose token ids are the target's; see
    :class:`Network`.
    """

    vocab_size: int  # the target's; either vocabulary may be padded further than the other
    vocabulary: Vocabulary | None = None

    def inputs(self, tokens: torch.Tensor, states: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return token ids as ``input_ids``, [1, num_tokens] int64."""
        return {"input_ids": tokens[None]}

    def scores(self, outputs: torch.Tensor) -> Scores:
        """Return logits without padding.  [..., padded_vocab] -> [..., vocab]"""
        return Scores(outputs[..., : self.vocab_size])


class AssistantDrafter(PackedDrafter):
    """Beam search on the draft model's probabilities, coupled to the noise of sampled requests.

    Its candidate trees hold every beam node. The draft's K/V cache holds committed tokens only: a
    call first processes all tokens that lack K/V, such as the prompt, tokens decoded without
    drafting, or those of the last step. If a request has many such tokens, they are processed over
    several steps, so that a long prompt does not stall other requests; until then its trees are
    only roots.
    """

    # Maximum number of tokens that one step processes, over all requests that lack the K/V of more
    # than FEW tokens
    CATCH_UP = 1024
    FEW = MAX_CATCH_UP

    def __init__(self, packed: PackedModel, room: Room, network: Network | None = None):
        """Create a drafter without requests; if ``network`` is None, token ids are the target's."""
        super().__init__(packed, room)
        self.network = network or AssistantNetwork(room.vocab_size)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with as_memory_error(), evaluating(self.packed.model):
            by_request = self._with_room(requests)
            for tokens in by_request.values():  # after an undone step, forward the root again
                self.sequences.of(tokens).truncate(len(tokens.tokens) - 1)
            ready = self._catch_up(by_request)
            trees = self._draft(ready, plan) if ready else []
            return with_roots(requests, dict(zip(ready, trees, strict=True)))

    def _with_room(self, requests: Sequence[Request]) -> dict[Request, RequestTokens]:
        """Reserve K/V slots for one more step; return the requests that got them, with their tokens
        in the draft's vocabulary.
        """
        self.sequences.reserve(requests)
        return {request: request for request in requests}

    def _catch_up(self, by_request: dict[Request, RequestTokens]) -> dict[Request, RequestTokens]:
        """Return the requests that can draft now; of the others, prefill as many tokens as one step
        may.

        Prefixes that several requests have in common are prefilled once.
        """
        ready = dict[Request, RequestTokens]()
        num_left = self.CATCH_UP
        behind = [
            tokens
            for tokens in by_request.values()
            if len(self.sequences.uncached(tokens)) > self.FEW
        ]
        for request, tokens in by_request.items():
            if tokens in behind:
                behind.remove(tokens)
                self.sequences.reuse(tokens)
            num_uncached = len(self.sequences.uncached(tokens))
            if num_uncached <= self.FEW:
                ready[request] = tokens
            elif num_uncached <= num_left:
                ready[request] = tokens
                num_left -= num_uncached
                is_shared = any(
                    num_common(tokens.tokens, each.tokens) > self.FEW for each in behind
                )
                if is_shared and self.sequences.max_kept is not None:
                    self.sequences.prefill(tokens, num_uncached - 1)
            elif num_left:
                self.sequences.prefill(tokens, num_left)
                num_left = 0
        return ready

    def _draft(self, by_request: dict[Request, RequestTokens], plan: Plan) -> list[TokenTree]:
        run = partial(self._run, list(by_request.values()))
        rows = self.packed.num_draft_rows(len(by_request))
        return beam_search(list(by_request), plan, self.network, run, self.packed.device, rows)

    def reuse(self, request: Request) -> int:
        """Use K/V kept for a common prefix with another request; return how many of the request's
        tokens have K/V.
        """
        return 0 if self.sequences.max_kept is None else self.sequences.reuse(request)

    def _run(self, requests: Sequence[RequestTokens], indices: IntArray, level: Level) -> Any:
        """Forward the last tree level of some requests or, at the root, all committed tokens that
        lack K/V; return the result of ``Level.grown``.
        """
        requests = [requests[index] for index in indices]
        sequences = [self.sequences.of(request) for request in requests]
        if not level.is_root:
            root_positions = [len(request.tokens) - 1 for request in requests]
            parts = draft_nodes(self.packed, sequences, root_positions, level.sizes)
            return self.sequences.draft(
                parts, torch.arange(len(requests) * level.beam, device="cpu"), level
            )
        uncached = [self.sequences.uncached(request) for request in requests]
        parts = [
            chain(self.packed, sequence, tokens)
            for sequence, tokens in zip(sequences, uncached, strict=True)
        ]
        last_rows = np.cumsum([len(tokens) for tokens in uncached]) - 1
        grown = self.sequences.draft(parts, torch.from_numpy(last_rows), level)
        for sequence, request in zip(sequences, requests, strict=True):
            sequence.length = len(request.tokens)
        return grown


@dataclass(frozen=True, repr=False)
class AssistantMethod(DraftMethod):
    """Method that drafts with a smaller causal LM with the target's tokenizer."""

    assistant: Any

    kind = "assistant model"

    @property
    def model(self) -> Any:
        return self.assistant

    def check(self, target: Any) -> None:
        check_vocabulary(self.assistant, target)
        check_device(self.assistant, target)
        check_encoder(self.assistant, target)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        return AssistantDrafter(draft, room)


def check_vocabulary(assistant: Any, target: Any) -> None:
    """Raise IncompatibleDraftError if the vocabularies differ by more than padding."""
    smaller, larger = sorted((vocab_size(target), vocab_size(assistant)))
    if larger - smaller > min(PADDING, smaller / 2):
        raise IncompatibleDraftError(
            f"assistant_model has a vocabulary of {vocab_size(assistant)} tokens and the target one of "
            f"{vocab_size(target)}, which differ by more than padding; use a draft that was trained with the target's "
            "tokenizer, or give both tokenizers beside it, tokenizer=... and assistant_tokenizer=..."
        )


def check_encoder(assistant: Any, target: Any) -> None:
    """Raise IncompatibleDraftError if a draft's decoder attends to an encoder that the target does
    not provide.
    """
    if not attends_to_encoder(assistant):
        return
    if not target.config.is_encoder_decoder:
        if assistant.config.is_encoder_decoder:
            raise IncompatibleDraftError(
                f"assistant_model {type(assistant).__name__} is an encoder-decoder, and {type(target).__name__} has no "
                "encoder; use a decoder-only draft"
            )
        return
    if not assistant.config.is_encoder_decoder:
        sizes = [model.config.get_text_config().hidden_size for model in (target, assistant)]
        if sizes[0] != sizes[1]:
            raise IncompatibleDraftError(
                f"assistant_model attends to encoder outputs of size {sizes[1]}, and those of the target have "
                f"{sizes[0]}; load it with its own encoder, as {type(target).__name__}"
            )
    elif assistant.main_input_name != target.main_input_name:
        raise IncompatibleDraftError(
            f"the encoder of assistant_model takes {assistant.main_input_name} and that of the target "
            f"{target.main_input_name}; use a draft of the same kind"
        )


def check_device(assistant: Any, target: Any) -> None:
    """Raise IncompatibleDraftError if the models are on different devices."""
    if input_device(target) != input_device(assistant):
        raise IncompatibleDraftError(
            f"assistant_model is on {input_device(assistant)} and the target on {input_device(target)}; "
            f"move it there with assistant_model.to('{input_device(target)}')"
        )
