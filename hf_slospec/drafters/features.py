"""Features (hidden states of the target) of committed tokens, and the base of drafters that read
them.
"""

from __future__ import annotations

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

MAX_WAITING = 256  # tokens of one request whose features may wait; more are processed at once


@dataclass(eq=False)
class _Waiting:
    """Features of one request that wait to be processed."""

    end: int = 0  # index behind the last token that was added or skipped
    num_tokens: int = 0  # sum over all parts
    parts: list[torch.Tensor] = field(default_factory=list)  # [num_tokens, num_features] each
    has_gap: bool = False  # features of earlier tokens are missing
    last: torch.Tensor | None = None  # [1, num_features], of the last token that was processed


class FeatureQueue:
    """Features of requests' committed tokens, in order, from the first one that was not processed."""

    def __init__(self) -> None:
        self._waiting: dict[Request, _Waiting] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        waiting = list(self._waiting.values())  # a copy, as other threads read this property
        return sum(
            part.nbytes
            for queue in waiting
            for part in (*queue.parts, queue.last)
            if part is not None
        )

    def begin_at(self, request: Request, index: int) -> None:
        """Begin a request at the token ``index``; features of earlier ones are not needed."""
        self._waiting[request] = _Waiting(index)

    def add(self, request: Request, begin: int, features: torch.Tensor) -> None:
        """Append the features [num_tokens, num_features] of the tokens from ``begin`` on.

        Features that are known already are ignored. Tokens without features stay without: the
        drafter does not see them.
        """
        queue = self._waiting.setdefault(request, _Waiting())
        features = features[max(queue.end - begin, 0) :]
        if not len(features):
            return
        if begin > queue.end:
            queue.parts = []
            queue.num_tokens = 0
            queue.has_gap = True
        if 2 * features.nbytes < features.untyped_storage().nbytes():
            features = features.clone()  # a view would keep the features of a whole step
        queue.end = max(queue.end, begin) + len(features)
        queue.parts.append(features)
        queue.num_tokens += len(features)

    def num_waiting(self, request: Request) -> int:
        """Return the number of a request's waiting tokens."""
        return self._waiting[request].num_tokens if request in self._waiting else 0

    def is_complete(self, request: Request) -> bool:
        """Return whether the features of all tokens but the root are known."""
        queue = self._waiting.get(request)
        if queue is None or queue.end != len(request.tokens) - 1:
            return False
        return bool(queue.parts) or queue.last is not None

    def has_gap(self, request: Request) -> bool:
        """Return whether features of earlier tokens are missing."""
        return request in self._waiting and self._waiting[request].has_gap

    def last(self, request: Request) -> torch.Tensor:
        """Return the feature of the last known token.  -> [1, num_features]"""
        queue = self._waiting[request]
        last = queue.parts[-1][-1:] if queue.parts else queue.last
        assert last is not None, "a request is drafted for when its features are complete"
        return last

    def take(self, request: Request) -> tuple[int, torch.Tensor]:
        """Remove the waiting features; return the index of the first one's token, and the features.

        If none waits, the last token's feature is returned again.

        Returns:
            index, and features [num_tokens, num_features].
        """
        queue = self._waiting[request]
        last = self.last(request)
        # a view would keep the features of a whole step
        parts = queue.parts or [last]
        queue.last = last.clone()
        queue.parts = []
        queue.num_tokens = 0
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        return queue.end - len(features), features

    def drop(self, request: Request) -> None:
        """Drop a request, if it is known."""
        self._waiting.pop(request, None)

    def clear(self) -> None:
        """Drop all requests."""
        self._waiting.clear()


class FeatureDrafter(PackedDrafter):
    """Base of drafters whose network caches K/V of committed tokens, computed from features of the
    target.

    Features of prompts are processed as they come, later ones when they are needed. Tokens without
    features (their K/V was given to ``generate``, or memory ran short) are not seen by the network:
    fewer of its proposals are accepted, and no output changes.
    """

    def __init__(self, packed: PackedModel, room: Room):
        self.head: Any = packed.model  # a Head
        super().__init__(packed, room, self.head.min_nodes)
        self.features = FeatureQueue()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.head.feature_layers)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the target's vocabulary.  [..., draft_vocab] -> [..., vocab]"""
        vocabulary: Vocabulary | None = self.head.vocabulary(self.vocab_size)
        if vocabulary is None:
            return logits[..., : self.vocab_size]
        return vocabulary.spread(logits)

    @property
    def num_feature_bytes(self) -> int:
        return self.features.num_bytes

    def take_features(self, request: Request, begin: int, features: torch.Tensor) -> None:
        self.features.add(request, begin, features)
        if self.features.has_gap(request):
            self.sequences.withhold(request)
        if self.features.num_waiting(request) > MAX_WAITING:
            try:
                with as_memory_error(), evaluating(self.packed.model):
                    self._process([request])
            except MemoryError:  # drop this request's K/V; outputs do not change
                self.sequences.release(request, may_keep=False)
                self.features.drop(request)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        ready = [request for request in requests if self.features.is_complete(request)]
        trees = dict[Request, TokenTree]()
        if ready:
            with as_memory_error(), evaluating(self.packed.model):
                trees = dict(zip(ready, self._draft(ready, plan), strict=True))
        return with_roots(requests, trees)

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        """Return the candidate trees of requests whose features are complete."""
        raise NotImplementedError

    def _process(self, requests: Sequence[Request]) -> object:
        """Cache the K/V of all waiting features."""
        raise NotImplementedError

    def reuse(self, request: Request) -> int:
        before = self.sequences.num_cached(request)
        if (num_reused := self.sequences.reuse(request)) > before:
            num_reused -= (
                1  # the last entry may depend on the token behind it, which may differ here
            )
            self.sequences.of(request).length = num_reused
            self.features.begin_at(request, num_reused)
        return num_reused

    def release(self, request: Request) -> None:
        super().release(request)
        self.features.drop(request)

    def close(self) -> None:
        self.features.clear()
        super().close()
