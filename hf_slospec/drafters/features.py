"""Features (hidden states of the target) of committed tokens, and the base of drafters that read
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_slospec.drafters.level import Vocabulary
from hf_slospec.drafters.methods import PackedDrafter, Room, with_roots
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree

MAX_WAITING = 256  # maximum tokens of one request whose features wait; more are processed at once


@dataclass(eq=False)
class WaitingFeatures:
    """Features of one request's committed tokens, in order, that were not processed yet."""

    end: int = 0  # index in ``request.tokens`` behind the last token that was added or skipped
    num_tokens: int = 0  # tokens of all parts together
    parts: list[torch.Tensor] = field(default_factory=list)  # [num_tokens, num_features] each
    has_gap: bool = False  # features of earlier tokens are missing
    last: torch.Tensor | None = None  # [1, num_features], of the last token that was processed

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        return sum(part.nbytes for part in (*self.parts, self.last) if part is not None)

    def add(self, begin: int, features: torch.Tensor) -> None:
        """Append the features [num_tokens, num_features] of the tokens from ``begin`` on.

        Features that were added before are ignored. Skipped tokens never get features, so the
        drafter does not see them.
        """
        features = features[max(self.end - begin, 0) :]
        if not len(features):
            return
        if begin > self.end:
            self.parts = []
            self.num_tokens = 0
            self.has_gap = True
        if 2 * features.nbytes < features.untyped_storage().nbytes():
            features = features.clone()  # a view would keep the features of a whole step
        self.end = max(self.end, begin) + len(features)
        self.parts.append(features)
        self.num_tokens += len(features)

    def is_complete(self, num_tokens: int) -> bool:
        """Return whether the features of all of ``num_tokens`` tokens but the last, the root, are
        known.
        """
        return self.end == num_tokens - 1 and (bool(self.parts) or self.last is not None)

    def take(self) -> tuple[int, torch.Tensor]:
        """Remove the features; return the index of the first one's token, and the features.

        If none waits, the last token's feature is returned again.

        Returns:
            index, and features [num_tokens, num_features].
        """
        features = torch.cat(self.parts) if len(self.parts) > 1 else (*self.parts, self.last)[0]
        assert features is not None, "a request is drafted for when its features are complete"
        # a view would keep the features of a whole step
        self.last = features[-1:].clone()
        self.parts = []
        self.num_tokens = 0
        return self.end - len(features), features


class FeatureDrafter(PackedDrafter):
    """Base class of drafters whose network caches K/V of committed tokens, computed from features
    of the target.

    Features of prompts are processed as they come, later ones when they are needed. Tokens without
    features (their K/V was given to ``generate``, or memory ran short) are not seen by the network:
    fewer of its proposals are accepted, and no output changes.
    """

    def __init__(self, packed: PackedModel, room: Room):
        self.head: Any = packed.model  # a Head
        super().__init__(packed, room, self.head.min_nodes)
        self.features = defaultdict[Request, WaitingFeatures](WaitingFeatures)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.head.feature_layers)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary. [..., draft_vocab] -> [..., vocab]"""
        vocabulary: Vocabulary | None = self.head.vocabulary(self.vocab_size)
        if vocabulary is None:
            return logits[..., : self.vocab_size]
        return vocabulary.spread(logits)

    @property
    def num_feature_bytes(self) -> int:
        waiting = list(self.features.values())  # a copy, as other threads read this property
        return sum(features.num_bytes for features in waiting)

    def take_features(self, request: Request, begin: int, features: torch.Tensor) -> None:
        waiting = self.features[request]
        waiting.add(begin, features)
        if waiting.has_gap:
            self.sequences.withhold(request)
        if waiting.num_tokens > MAX_WAITING:
            # If memory runs short, the request's draft K/V is dropped; outputs do not change.
            try:
                with as_memory_error(), evaluating(self.packed.model):
                    self._process([request])
            except MemoryError:
                self.sequences.release(request, may_keep=False)
                self.features.pop(request, None)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        ready = [r for r in requests if self.features[r].is_complete(len(r.tokens))]
        trees = dict[Request, TokenTree]()
        if ready:
            with as_memory_error(), evaluating(self.packed.model):
                trees = dict(zip(ready, self._draft(ready, plan), strict=True))
        return with_roots(requests, trees)

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        """Return the candidate trees of requests whose features are complete."""
        raise NotImplementedError

    def _process(self, requests: Sequence[Request]) -> object:
        """Cache the K/V of the tokens whose features wait, computed from these features."""
        raise NotImplementedError

    def reuse(self, request: Request) -> int:
        num_cached = self.sequences.num_cached(request)
        if (num_reused := self.sequences.reuse(request)) > num_cached:
            # the last K/V entry may depend on the token behind it, which may differ in this request
            num_reused -= 1
            self.sequences.of(request).length = num_reused
            self.features[request] = WaitingFeatures(num_reused)
        return num_reused

    def release(self, request: Request) -> None:
        super().release(request)
        self.features.pop(request, None)

    def close(self) -> None:
        self.features.clear()
        super().close()
