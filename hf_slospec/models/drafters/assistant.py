"""Drafting with an assistant model, by a beam search of all requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.costs import MAX_CATCH_UP
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.attention import NewTokens
from hf_slospec.models.compatibility.probe import evaluating
from hf_slospec.models.drafters.beam import BeamLayer, Scores, beam_search
from hf_slospec.models.kv_cache.request_sequences import RequestSequences
from hf_slospec.models.memory import as_memory_error
from hf_slospec.models.packed import PackedModel


class AssistantDrafter:
    """Beam search on the draft model's probabilities, coupled to the noise of sampled requests.

    Its candidate trees hold every beam node. The draft's K/V cache holds committed tokens only: a call first processes
    every token that lacks K/V, be it the whole prompt, a stretch decoded without drafting, or the last step's tokens.
    Long stretches are processed over several steps, so that a long prompt does not stall other requests; until a
    request has caught up, its trees are roots.
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
    ):
        """``max_nodes`` bounds depth times width of plans, ``vocab_size`` the proposed ids.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`.
        """
        self.packed, self.vocab_size = packed, vocab_size
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        with as_memory_error(), evaluating(self.packed.model):
            return self._trees_of(requests, plan)

    def _trees_of(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        self.sequences.reserve(requests)
        for request in requests:  # after a step that was undone the root may be cached; its logits are wanted again
            own = self.sequences.of(request)
            own.length = min(own.length, len(request.tokens) - 1)
        ready = self._catch_up(requests)
        trees = dict(zip(ready, self._draft(ready, plan) if ready else [], strict=True))
        return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _catch_up(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that can draft now, after processing as many tokens of others as a step may."""
        ready, left = [], self.CATCH_UP
        for request in requests:
            behind = len(self.sequences.uncached(request))
            if behind <= self.FEW:
                ready.append(request)
            elif behind <= left:
                ready.append(request)
                left -= behind
            elif left:
                self.sequences.prefill(request, left)
                left = 0
        return ready

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        roots = Scores(self._root_logits(requests)[:, None])
        root_positions = [len(request.tokens) - 1 for request in requests]
        return beam_search(requests, plan, roots, partial(self._forward_layer, requests), root_positions)

    def reuse(self, request: Request) -> int:
        """Give a request that has no K/V that of a text which begins alike; return its tokens with K/V."""
        return self.sequences.reuse(request)

    def release(self, request: Request) -> None:
        self.sequences.release(request)

    def relieve(self) -> bool:
        """Free the K/V of all requests, which only saves time; return whether there was any."""
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        """Release all requests and the model's K/V cache."""
        self.sequences.close()

    def _root_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        """Cache all committed tokens that lack K/V.  -> logits after each root, [num_requests, vocab]"""
        tails = [self.sequences.uncached(request) for request in requests]
        parts = [self.sequences.chain(request, tail) for request, tail in zip(requests, tails, strict=True)]
        last_rows = np.cumsum([len(tail) for tail in tails]) - 1
        logits = self._logits(parts, torch.from_numpy(last_rows))
        for request in requests:
            self.sequences.of(request).length = len(request.tokens)
        return logits

    def _forward_layer(self, requests: Sequence[Request], layer: BeamLayer) -> Scores:
        sequences = [self.sequences.of(request) for request in requests]
        positions = self.packed.clamp_positions(layer.positions)
        parts = [NewTokens(*part) for part in zip(sequences, layer.tokens, positions, layer.ancestors, strict=True)]
        return Scores(self._logits(parts, torch.arange(layer.tokens.numel())).view(*layer.tokens.shape, -1))

    def _logits(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> torch.Tensor:
        """Return logits of the ids that both models have, as either vocabulary may be padded further than the other."""
        return self.sequences.forward(parts, logit_rows).logits[:, : self.vocab_size]
