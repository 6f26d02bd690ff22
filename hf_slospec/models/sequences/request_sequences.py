"""K/V of one engine's requests, and packed forwards that use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.packed.inputs import DraftLevel, Outputs
from hf_slospec.models.packed.tree_mask import chain, chain_and_tree
from hf_slospec.models.recurrent.states import RecurrentStates
from hf_slospec.models.sequences.prefix_reuse import PrefixReuse
from hf_slospec.models.sequences.room import RequestTokens


class RequestSequences(PrefixReuse):
    """K/V of one engine's requests in a model's cache: their slots, prefix reuse and forwards."""

    def forward(
        self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, feature_layers: tuple[int, ...] = ()
    ) -> Outputs:
        """Forward new tokens of requests; see :meth:`PackedModel.outputs`."""
        if self.max_kept is not None:
            self.packed.fingerprint.notice()
        for part in parts:
            part.sequence.staged_end = part.sequence.length + part.num_tokens
        return self.packed.outputs(self.cache.pool, parts, logit_rows, feature_layers)

    def draft(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel) -> Any:
        """Forward a level of draft nodes of requests; see :meth:`PackedModel.draft`."""
        if self.max_kept is not None:
            self.packed.fingerprint.notice(structure=False)
        return self.packed.draft(self.cache.pool, parts, logit_rows, level)

    def uncached(self, request: RequestTokens) -> list[int]:
        """Return the request's committed tokens without K/V."""
        return request.tokens[self.num_cached(request) :]

    def prefill(self, request: RequestTokens, num_tokens: int) -> None:
        """Compute the K/V of the request's next ``num_tokens`` tokens."""
        part = self.chain(request, self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64, device="cpu"))
        self.of(request).length += num_tokens

    def chain(self, request: RequestTokens, tokens: Sequence[int]) -> NewTokens:
        """Return the new tokens of a forward: ``tokens`` behind the cached ones, with a causal mask."""
        return chain(self.packed, self.of(request), tokens, self._embeds.get(request))

    def chain_and_tree(self, request: RequestTokens, tokens: Sequence[int], tree: TokenTree) -> NewTokens:
        """Return the new tokens of a forward: ``tokens`` up to the root, then the tree's other nodes."""
        return chain_and_tree(self.packed, self.of(request), tokens, tree, self._embeds.get(request))

    def give_embeds(self, request: RequestTokens, embeds: torch.Tensor) -> None:
        """Set embeddings that replace those of the prompt's tokens.  [prompt_len, hidden]"""
        self._embeds[request] = embeds

    def load(
        self,
        request: RequestTokens,
        layers: Iterable[Sequence[torch.Tensor]],
        length: int,
        position_offset: int = 0,
        states: RecurrentStates | None = None,
    ) -> None:
        """Copy in the K/V of the request's first ``length`` tokens; see :meth:`KVCache.load`.

        ``position_offset``: positions of later tokens minus their indices.
        """
        sequence = self.of(request)
        self.cache.load(sequence, layers, length, states)
        sequence.position_offset = position_offset

    def replace(self, request: RequestTokens, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        """Replace each layer's K, V and index keys [num_heads, 1, dim] of the token behind the cached ones."""
        sequence = self.of(request)
        self.cache.write(sequence, layers, sequence.length + 1)

    def last_slots(self, request: RequestTokens, number: int) -> torch.Tensor:
        """Return the slots of the last cached tokens of a request.  -> [number] int64, on the host"""
        sequence = self.of(request)
        assert number <= sequence.length, "slots before a sequence are another's"
        end = sequence.start + sequence.length
        return torch.arange(end - number, end, device="cpu")

    def states(self, request: RequestTokens) -> RecurrentStates | None:
        """Return the states after the request's cached tokens; None if the model has none."""
        sequence = self.of(request)
        if sequence.states is not None:
            sequence.states.take_in(sequence.length)
        return sequence.states
