"""Simulated target and drafter: tokens from given texts, durations from given costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, IntArray, TokenTree
from hf_slospec.engine.protocols import Chooser, Chunk, Drafter, Plan, Target
from hf_slospec.engine.request import Request
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.texts import Library


class VirtualClock:
    """A clock that advances only when ``now_s`` is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowedClock(VirtualClock):
    """A clock of a machine at half speed for a while: what begins within these seconds takes twice as long."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        super().__init__()

    def __setattr__(self, name: str, value: float) -> None:
        if name == "now_s":
            before_s = getattr(self, name, 0.0)
            value = before_s + (value - before_s) * (2.0 if self.begin_s <= before_s < self.end_s else 1.0)
        super().__setattr__(name, value)


class SimulatedTarget(Target):
    """Chooses the tokens of each request's text and advances the clock by the cost of each forward."""

    def __init__(self, library: Library, hardware: Hardware, clock: VirtualClock):
        self.library, self.hardware, self.clock = library, hardware, clock

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        """Advance the clock by one forward of the trees and the chunks.  -> one chooser per request"""
        num_nodes = sum(tree.num_nodes for tree in trees)
        num_prefill_tokens = sum(request.num_uncached - 1 for request in requests) + sum(
            chunk.num_tokens for chunk in chunks
        )
        keys = sum(len(r.tokens) for r in requests) + sum(c.request.num_cached + c.num_tokens for c in chunks)
        is_mixed = num_prefill_tokens > 0 and any(request.is_decoding for request in requests)
        seconds = float(self.hardware.target(num_nodes + num_prefill_tokens, len(requests) + len(chunks), keys))
        self.clock.now_s += seconds + self.hardware.host_s + self.hardware.mixed_s * is_mixed
        return [functools.partial(self._choose, request) for request in requests]

    def _choose(self, request: Request, node: int) -> int:
        return self.library.token(request.index, request.num_emitted)

    def commit(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], chunks: Sequence[Chunk] = ()
    ) -> None:
        """Do nothing: there is no K/V cache."""

    def release(self, request: Request) -> None:
        """Do nothing: there is no K/V cache."""


@dataclass(frozen=True)
class _Layer:
    """One level of all requests' beams; every field is [num_requests, beam]."""

    path_probs: FloatArray
    min_probs: FloatArray  # conditional probability of the least probable token on the path
    is_true: BoolArray  # whether the target would choose every token of the path
    tokens: IntArray
    parents: IntArray  # index in the layer before


class SimulatedDrafter(Drafter):
    """Beam search over the draft's probabilities of the texts.

    On the path that the target will take they are those of the text's own places. On all other paths, where nothing is
    accepted, they are those of random places of the same text: wrong proposals look as good as right ones.
    """

    def __init__(self, library: Library, hardware: Hardware, clock: VirtualClock, seed: int = 0):
        self.library, self.hardware, self.clock = library, hardware, clock
        self._rng = np.random.default_rng(seed)
        self._num_cached: dict[Request, int] = {}  # tokens in the draft's K/V cache

    def draft(self, requests: Sequence[Request], plan: Plan) -> Sequence[TokenTree]:
        """Advance the clock by the forwards of all draft levels.  -> one candidate tree per request"""
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        num_uncached = num_keys - sum(self._num_cached.get(request, 0) for request in requests)
        self._num_cached.update((request, len(request.tokens)) for request in requests)
        seconds = float(self.hardware.draft(num_uncached, num_requests, num_keys))
        layers = [self._expand(requests, None, 0, plan.width)]
        for depth in range(1, plan.depth):
            paths = layers[-1].path_probs
            if plan.min_gain and np.maximum(paths - plan.min_path_prob, 0.0).sum() < plan.min_gain:
                break  # the rules of the real drafters
            if plan.goes_on is not None and not plan.goes_on(paths):
                break
            if plan.min_confidence and not (layers[-1].min_probs > plan.min_confidence).any():
                break
            seconds += float(self.hardware.draft(layers[-1].tokens.size, num_requests, num_keys))
            layers.append(self._expand(requests, layers[-1], depth, plan.width))
        self.clock.now_s += seconds + self.hardware.drafting_request_s * num_requests
        trees = self._trees(requests, layers)
        if self.library.matched == 1.0:
            return trees
        is_matched = self._rng.random(len(requests)) < self.library.matched
        return [tree if found else tree.up_to(0) for tree, found in zip(trees, is_matched, strict=True)]

    def release(self, request: Request) -> None:
        """Drop the request's draft K/V cache."""
        self._num_cached.pop(request, None)

    def _expand(self, requests: Sequence[Request], last: _Layer | None, depth: int, width: int) -> _Layer:
        """Return the ``width`` most probable children of a layer, or of the roots if ``last`` is None."""
        if last is None:
            column = np.ones((len(requests), 1))
            last = _Layer(column, column, column > 0.0, column.astype(np.int64), column.astype(np.int64))
        library, beam = self.library, last.tokens.shape[1]
        indices = np.array([request.index for request in requests])
        on_path = np.array([request.num_emitted + depth for request in requests])
        elsewhere = (self._rng.random(last.tokens.shape) * library.lengths[indices][:, None]).astype(np.int64)
        places = np.where(last.is_true, on_path[:, None], elsewhere)
        rows = library.places(np.repeat(indices, beam), places.ravel())
        num_children = min(width, library.num_children)
        probs = library.child_probs[rows, :num_children].reshape(len(requests), beam, num_children)
        ranks = library.ranks[rows].reshape(len(requests), beam, 1)
        paths = (last.path_probs[..., None] * probs).reshape(len(requests), -1)
        min_probs = np.minimum(last.min_probs[..., None], probs).reshape(len(requests), -1)
        is_true = (last.is_true[..., None] & (ranks == np.arange(num_children))).reshape(len(requests), -1)
        order = np.argsort(-paths, axis=1, kind="stable")[:, :width]
        return _Layer(
            np.take_along_axis(paths, order, axis=1),
            np.take_along_axis(min_probs, order, axis=1),
            np.take_along_axis(is_true, order, axis=1),
            order % num_children,
            order // num_children,
        )

    def _trees(self, requests: Sequence[Request], layers: Sequence[_Layer]) -> list[TokenTree]:
        """Return one candidate tree per request, its nodes level by level."""
        widths = [layer.tokens.shape[1] for layer in layers]
        depths = np.repeat(np.arange(len(layers) + 1), [1, *widths])
        firsts = np.repeat(np.cumsum([0, 1, *widths])[: len(layers)], widths)
        column = np.ones((len(requests), 1))
        roots = np.array([[request.tokens[-1]] for request in requests])
        tokens = np.concatenate([roots, *(layer.tokens for layer in layers)], axis=1)
        parents = np.concatenate([layer.parents for layer in layers], axis=1) + firsts
        parents = np.concatenate([-column.astype(np.int64), parents], axis=1)
        path_probs = np.concatenate([column, *(layer.path_probs for layer in layers)], axis=1)
        return [
            TokenTree(own_tokens, own_parents, depths, own_probs)
            for own_tokens, own_parents, own_probs in zip(tokens, parents, path_probs, strict=True)
        ]
