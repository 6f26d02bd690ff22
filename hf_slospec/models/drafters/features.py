"""Features of committed tokens, kept until a drafter has processed them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_slospec.engine.request import Request


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
        return sum(part.nbytes for own in self._waiting.values() for part in own.parts)

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
        """Return the place of the first token that waits, and the features of all that do.

        Without any, those of the last token are returned once more.
        """
        own = self._waiting[request]
        last = self.last(request)
        parts, own.last = own.parts or [last], last.clone()  # a view would keep the features of a whole step
        own.parts, own.num_tokens = [], 0
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        return own.end - len(features), features

    def drop(self, request: Request) -> None:
        """Forget a request, if it is known."""
        self._waiting.pop(request, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
