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
from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.drafters.beam import BeamLayer, Scores, Vocabulary, beam_search
from hf_slospec.models.drafters.features import FeatureDrafter
from hf_slospec.models.heads.head import DraftHead


class HeadDrafter(FeatureDrafter):
    """Beam search on the predictions of a head (:class:`DraftHead`), whose K/V cache has an entry per known feature."""

    @property
    def head(self) -> DraftHead:
        """The network."""
        head: DraftHead = self.packed.model
        return head

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
        for request in requests:
            if not self.features.num_waiting(request):  # after a step that was undone the last entry is wanted again
                self.sequences.of(request).length -= 1
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
