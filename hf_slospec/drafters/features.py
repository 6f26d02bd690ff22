"""Features of committed tokens, and what the drafters that read them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.inspection.properties import evaluating
from hf_slospec.models.packed.model import PackedModel
from hf_slospec.models.sequences.request_sequences import RequestSequences

MAX_WAITING = 256  # tokens of one request whose features are kept; more are processed at once


@dataclass(eq=False)
class _Waiting:
    """Features of one request."""

    end: int = 0  # place behind the last token whose feature was taken or is not needed
    num_tokens: int = 0  # that wait
    parts: list[torch.Tensor] = field(default_factory=list)  # [num_tokens, num_features] each
    has_gap: bool = False  # features of earlier tokens are not known
    last: torch.Tensor | None = None  # [1, num_features], of the last token that was processed


class FeatureQueue:
    """Features that requests' committed tokens have, in order, from the first one that was not processed."""

    def __init__(self) -> None:
        self._waiting: dict[Request, _Waiting] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        waiting = list(self._waiting.values())  # other threads ask, too
        return sum(part.nbytes for own in waiting for part in (*own.parts, own.last) if part is not None)

    def begin_at(self, request: Request, place: int) -> None:
        """Begin a request at a token; features of those before it are not needed."""
        self._waiting[request] = _Waiting(place)

    def add(self, request: Request, begin: int, features: torch.Tensor) -> None:
        """Append the features [num_tokens, num_features] of the tokens from ``begin`` on.

        Those of tokens that are known already are left out. Tokens that were left out before stay so: a drafter then
        does not see them.
        """
        own = self._waiting.setdefault(request, _Waiting())
        features = features[max(own.end - begin, 0) :]
        if not len(features):
            return
        if begin > own.end:
            own.parts, own.num_tokens, own.has_gap = [], 0, True
        if 2 * features.nbytes < features.untyped_storage().nbytes():
            features = features.clone()  # a view would keep the features of a whole step
        own.end = max(own.end, begin) + len(features)
        own.parts.append(features)
        own.num_tokens += len(features)

    def num_waiting(self, request: Request) -> int:
        """Return the number of tokens that wait."""
        return self._waiting[request].num_tokens if request in self._waiting else 0

    def is_complete(self, request: Request) -> bool:
        """Return whether the features of all tokens but the root are known."""
        own = self._waiting.get(request)
        return own is not None and own.end == len(request.tokens) - 1 and bool(own.parts or own.last is not None)

    def has_gap(self, request: Request) -> bool:
        """Return whether features of earlier tokens were not known."""
        return request in self._waiting and self._waiting[request].has_gap

    def last(self, request: Request) -> torch.Tensor:
        """Return the feature of the last known token.  -> [1, num_features]"""
        own = self._waiting[request]
        last = own.parts[-1][-1:] if own.parts else own.last
        assert last is not None, "a request is drafted for when its features are complete"
        return last

    def take(self, request: Request) -> tuple[int, torch.Tensor]:
        """Return the place of the first token that waits, and the features [num_tokens, num_features] of all that do.

        Without any, those of the last token are returned once more.
        """
        own = self._waiting[request]
        last = self.last(request)
        parts, own.last = own.parts or [last], last.clone()  # a view would keep the features of a whole step
        own.parts, own.num_tokens = [], 0
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        return own.end - len(features), features

    def drop(self, request: Request) -> None:
        """Drop a request, if it is known."""
        self._waiting.pop(request, None)

    def clear(self) -> None:
        """Drop all requests."""
        self._waiting.clear()


class FeatureDrafter(Drafter):
    """Base of drafters whose network has K/V of committed tokens that it computes from features of the target.

    Features of prompts are processed as they come, later ones when they are needed. Where features are missing (of K/V
    that was given to ``generate``, or after memory ran short) the network does not see those tokens: fewer of its
    proposals are accepted, and no output changes.
    """

    def __init__(
        self, packed: PackedModel, max_nodes: int, vocab_size: int, max_slots: int | None = None, max_kept: float = 0
    ):
        """``max_nodes`` bounds the nodes staged at a time, ``vocab_size`` is the target's.

        ``max_slots`` and ``max_kept`` are those of :class:`RequestSequences`.
        """
        self.packed, self.vocab_size = packed, vocab_size
        self.sequences = RequestSequences(packed, max_nodes, max_slots, max_kept)
        self.features = FeatureQueue()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.packed.model.feature_layers
        return layers

    @property
    def num_one_off_forwards(self) -> int:
        return self.packed.num_one_off_forwards

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
            except MemoryError:  # ends nothing: this request's K/V only saves time, and the memory is needed
                self.sequences.release(request, may_keep=False)
                self.features.drop(request)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        ready = [request for request in requests if self.features.is_complete(request)]
        trees = dict[Request, TokenTree]()
        if ready:
            with as_memory_error(), evaluating(self.packed.model):
                trees = dict(zip(ready, self._draft(ready, plan), strict=True))
        return [trees.get(request) or TokenTree.root_only(request.tokens[-1]) for request in requests]

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        """Return the trees of requests whose features are complete."""
        raise NotImplementedError

    def _process(self, requests: Sequence[Request]) -> object:
        """Cache the K/V of all features that wait."""
        raise NotImplementedError

    def reuse(self, request: Request) -> int:
        before = self.sequences.num_cached(request)
        if (found := self.sequences.reuse(request)) > before:
            found -= 1  # the last one may have been computed with the token behind it, which may be another here
            self.sequences.of(request).length = found
            self.features.begin_at(request, found)
        return found

    def release(self, request: Request) -> None:
        self.sequences.release(request)
        self.features.drop(request)

    def relieve(self) -> bool:
        had_some = not self.sequences.is_empty
        self.close()
        return had_some

    def close(self) -> None:
        self.features.clear()
        self.sequences.close()
