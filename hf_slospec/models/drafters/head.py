"""Drafting with a trained head (EAGLE-3, MTP), which reads hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.compatibility.probe import evaluating
from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.drafters.beam import BeamLayer, Scores, Vocabulary, beam_search
from hf_slospec.models.drafters.features import FeatureQueue
from hf_slospec.models.heads.head import DraftHead
from hf_slospec.models.kv_cache.request_sequences import RequestSequences
from hf_slospec.models.memory import as_memory_error
from hf_slospec.models.packed import PackedModel

MAX_WAITING = 256  # tokens of one request whose features are kept; more are processed at once


class HeadDrafter:
    """Beam search on the predictions of a head that takes features of the target (:class:`DraftHead`).

    The head's K/V cache holds an entry per committed token but the last. Features of prompts are processed as they
    come, later ones when they are needed. Where features are missing (of K/V that was given to ``generate``, or after
    memory ran short) the head does not see those tokens: fewer of its proposals are accepted, and no output changes.
    """

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        vocab_size: int,
        max_slots: int | None = None,
        max_kept: float = 0,
    ):
        """``max_nodes`` bounds depth times width of plans, ``vocab_size`` is the target's.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`.
        """
        self.packed, self.vocab_size = packed, vocab_size
        self.head: DraftHead = packed.model
        self.feature_layers = self.head.feature_layers
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)
        self.features = FeatureQueue()

    def take_features(self, request: Request, begin: int, features: torch.Tensor) -> None:
        self.features.add(request, begin, features)
        if self.features.num_waiting(request) > MAX_WAITING:
            try:
                with as_memory_error(), evaluating(self.head):
                    self._process([request])
            except MemoryError:  # of this request only; its K/V costs speed, and that of the target is needed
                self._forget(request)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        ready = [request for request in requests if self.features.is_complete(request)]
        trees = dict[Request, TokenTree]()
        if ready:
            with as_memory_error(), evaluating(self.head):
                trees = dict(zip(ready, self._draft(ready, plan), strict=True))
        return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        roots = self._process(requests)
        ids = self.head.target_ids
        vocabulary = None if ids is None else Vocabulary(ids, self.vocab_size)
        # The entry of a token stands at the place of the token before it, whose feature it takes.
        places = [len(request.tokens) - 2 for request in requests]
        return beam_search(requests, plan, roots, partial(self._forward_layer, requests), places, vocabulary)

    def _process(self, requests: Sequence[Request]) -> Scores:
        """Cache the entries of all features that wait.  -> after each request's last entry, ``beam`` being 1"""
        self.sequences.reserve(requests)
        begins, features = zip(*(self.features.take(request) for request in requests), strict=True)
        lengths = [len(own) for own in features]
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        tokens = [r.tokens[begin + 1 : end + 1] for r, begin, end in zip(requests, begins, ends, strict=True)]
        ids = to_device(torch.tensor([token for own in tokens for token in own]), self.packed.device)
        hidden = self.head.combine(torch.cat(features).to(self.packed.device))
        inputs = self._inputs(ids, hidden).split(lengths)
        parts = []
        for request, begin, own_ids, embeds in zip(requests, begins, ids.split(lengths), inputs, strict=True):
            own = self.sequences.of(request)
            own.length = min(own.length, begin)  # after a step that was undone the last entry is computed again
            positions = self.packed.clamp_positions(torch.arange(begin, begin + len(embeds)))
            causal = torch.from_numpy(np.tri(len(embeds), dtype=np.bool_))
            parts.append(NewTokens(own, own_ids, positions, causal, embeds, is_chain=True))
        scores = self._scores(parts, torch.from_numpy(np.cumsum(lengths) - 1), (len(requests), 1))
        for request, length in zip(requests, lengths, strict=True):
            self.sequences.of(request).length += length
        return scores

    def _forward_layer(self, requests: Sequence[Request], layer: BeamLayer) -> Scores:
        assert layer.states is not None
        inputs = self._inputs(layer.tokens, layer.states)
        sequences = [self.sequences.of(request) for request in requests]
        positions = self.packed.clamp_positions(layer.positions)
        columns = zip(sequences, layer.tokens, positions, layer.ancestors, inputs, strict=True)
        parts = [NewTokens(*column) for column in columns]
        return self._scores(parts, torch.arange(layer.tokens.numel()), layer.tokens.shape)

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return embeddings and hidden states side by side.  [..., tokens] -> [..., tokens, embedding + hidden]"""
        return torch.cat((self.head.embed_tokens(tokens), hidden), dim=-1)

    def _scores(self, parts: Sequence[NewTokens], rows: torch.Tensor, shape: Sequence[int]) -> Scores:
        """Return logits and hidden states of entries, as [*shape, draft_vocab] and [*shape, hidden]."""
        found = self.sequences.forward(parts, rows).logits.view(*shape, -1)
        logits = found[..., : -self.head.hidden_size]
        own_ids = logits if self.head.target_ids is not None else logits[..., : self.vocab_size]
        return Scores(own_ids, found[..., -self.head.hidden_size :])

    def reuse(self, request: Request) -> int:
        """Give a request that has no K/V that of a text which begins alike; return its tokens with K/V."""
        before = self.sequences.num_cached(request)
        if (found := self.sequences.reuse(request)) > before:
            found -= 1  # the last entry was made with the token behind it, which may be another
            self.sequences.of(request).length = found
            self.features.begin_at(request, found)
        return found

    def release(self, request: Request) -> None:
        self.sequences.release(request, may_keep=not self.features.has_gap(request))
        self.features.drop(request)

    def _forget(self, request: Request) -> None:
        self.sequences.release(request, may_keep=False)
        self.features.drop(request)

    def relieve(self) -> bool:
        """Free the K/V of all requests, which only saves time; return whether there was any."""
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        """Release all requests and the head's K/V cache."""
        self.features.clear()
        self.sequences.close()
