"""Measured costs of a model's packed forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.models.attention import MAX_DENSE
from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.device.device_calls import apart_from_captures, synchronize
from hf_slospec.models.packed.model import PackedModel
from hf_slospec.models.packed.new_tokens import chain
from hf_slospec.models.recurrent.states import RecurrentStates

KEYS = 128  # cached tokens that each measured sequence attends to by default


@dataclass(frozen=True, order=True)
class Size:
    """Size of a forward: tokens over requests, each of which attends to its own cached tokens."""

    num_tokens: int
    num_requests: int = 1
    keys_each: int = KEYS

    @property
    def num_keys(self) -> int:
        """Cached tokens of all requests together."""
        return self.num_requests * self.keys_each


# Measured sizes, most needed first; the first two are always measured, as a curve needs a slope. Large ones are left
# out where half as many tokens cost WORTHWHILE times one. They are of several requests, as in steps: longer chains of
# one request, which are parts of prompts, are not captured in CUDA graphs. Kernels work by blocks of rows, so that the
# next sizes after 16 and 32 can cost much more than a line to the next power of two says (a quarter more, on a CPU).
CURVE = tuple(Size(tokens, -(-tokens // MAX_DENSE)) for tokens in (1, 4, 16, 64, 6, 32, 18, 8, 2, 36, 128, 256, 512))
NEEDED = CURVE[:2]
SLOPES = (Size(16, 4), Size(16, 1, 1024))  # costs of requests and of keys, against the 16 tokens of the curve
HELD_OUT = (Size(3), Size(12, 4), Size(24, 8), Size(48, 2, 512), Size(96, 2))  # to evaluate the fit
WORTHWHILE = 4.0
MAX_PER_REQUEST = 0.1  # share of the time of 16 tokens
LEAST = 0.1  # least share of a forward's seconds due to its tokens: a pause of the machine may inflate other terms
REPEATS = 4


@dataclass
class Measured:
    """Fastest seconds by size, as a busy machine only adds time."""

    seconds: dict[Size, float] = field(default_factory=dict)

    def add(self, size: Size, seconds: float) -> None:
        """Keep the time of a forward if it is the fastest of its size."""
        self.seconds[size] = min(seconds, self.seconds.get(size, seconds))

    def fit(self) -> ForwardCost:
        """Fit a monotone curve in tokens, with linear terms for further requests and for the keys they see.

        The terms are computed from few forwards and bounded, so that a pause during one does not make them absurd.
        """
        at_16, many, long = (self.seconds.get(size) for size in (Size(16), *SLOPES))
        per_key_s = per_request_s = 0.0
        if at_16 is not None and long is not None:
            per_key_s = min(max(long - at_16, 0.0), at_16) / (SLOPES[1].num_keys - KEYS)
        if at_16 is not None and many is not None:
            extra_s = many - at_16 - per_key_s * (SLOPES[0].num_keys - KEYS)
            per_request_s = min(max(extra_s, 0.0) / (SLOPES[0].num_requests - 1), MAX_PER_REQUEST * at_16)
        points = {
            size.num_tokens: max(s - per_key_s * size.num_keys - per_request_s * (size.num_requests - 1), LEAST * s)
            for size, s in self.seconds.items()
            if size in CURVE
        }
        return ForwardCost(LatencyCurve.fit(list(points), list(points.values())), per_request_s, per_key_s)

    def errors(self, cost: ForwardCost) -> dict[Size, float]:
        """Return the relative error of a fit at the held-out sizes; positive where it predicts too much."""
        held_out = {size: self.seconds[size] for size in HELD_OUT if size in self.seconds}
        predicted = {size: float(cost(size.num_tokens, size.num_requests, size.num_keys)) for size in held_out}
        return {size: predicted[size] / seconds - 1.0 for size, seconds in held_out.items()}


def measure(
    packed: PackedModel,
    limit_s: float,
    held_out: bool = False,
    on_forward: Callable[[Size], None] = lambda _: None,
    repeats: int = REPEATS,
) -> Measured:
    """Time forwards of many sizes in rounds for about ``limit_s`` seconds, of fewer sizes where the model is slow.

    Forwards that are expected to end after the limit are left out, so that one large forward of a slow model does not
    take several times the limit. The caller must hold the model's lock.
    """
    return measure_by(Forwards(packed), limit_s, held_out, on_forward, repeats)


class Timer(Protocol):
    """Runner of forwards of given sizes."""

    def __call__(self, size: Size) -> float:
        """Return the seconds of a forward of this size."""

    def clock(self) -> float:
        """Return monotonic seconds."""


def measure_by(
    forward_s: Timer,
    limit_s: float,
    held_out: bool = False,
    on_forward: Callable[[Size], None] = lambda _: None,
    repeats: int = REPEATS,
) -> Measured:
    """Measure as :func:`measure` does, by a timer of its own."""
    measured = Measured()
    sizes = [*CURVE[:4], *SLOPES, *CURVE[4:], *(HELD_OUT if held_out else ())]
    forward_s(Size(1))  # includes one-off costs
    started_s = forward_s.clock()
    for repeat in range(repeats):
        for size in sizes:
            is_needed = repeat == 0 and size in NEEDED
            left_s = limit_s - (forward_s.clock() - started_s)
            if is_needed or (_expected_s(size, measured) < left_s and _is_worthwhile(size, measured)):
                measured.add(size, forward_s(size))
                on_forward(size)
    return measured


def _expected_s(size: Size, measured: Measured) -> float:
    """Return the seconds that a forward will take, by those measured so far."""
    return float(measured.fit()(size.num_tokens, size.num_requests, size.num_keys))


def _is_worthwhile(size: Size, measured: Measured) -> bool:
    smaller = [known for known in CURVE if known in measured.seconds and 2 * known.num_tokens <= size.num_tokens]
    return size.num_tokens <= 64 or measured.seconds[max(smaller)] < WORTHWHILE * measured.seconds[Size(1)]


class Forwards:
    """Timer of packed forwards of given sizes; they reserve K/V for the time they take."""

    def __init__(self, packed: PackedModel):
        self.packed, self.clock, self._cache = packed, packed.ranks.clock, packed.kv_cache

    def __call__(self, size: Size) -> float:
        """Return the seconds of a forward of this size; of a replay, where forwards are captured."""
        lengths = list(self._split(size))
        with self._cache.temporary([size.keys_each + length for length in lengths]) as sequences:
            for sequence in sequences:
                sequence.length = size.keys_each
                sequence.states = RecurrentStates(size.keys_each) if self.packed.has_states else None
            graphs = self.packed.graphs_of(self._cache.pool)
            num_captured = 0 if graphs is None else len(graphs)
            with contextlib.nullcontext() if graphs is None else graphs.capturing_at_once():
                seconds = self._forward(sequences, lengths)
                is_capture = graphs is not None and len(graphs) != num_captured
                return self._forward(sequences, lengths) if is_capture else seconds

    def _forward(self, sequences: list[CachedSequence], lengths: list[int]) -> float:
        with apart_from_captures(self.packed.device):
            begun_s = self.clock()
            parts = [chain(self.packed, own, [0] * length) for own, length in zip(sequences, lengths, strict=True)]
            self.packed.forward(self._cache.pool, parts, torch.arange(sum(lengths)))
            synchronize(self.packed.device)
            return self.clock() - begun_s

    @staticmethod
    def _split(size: Size) -> Iterator[int]:
        """Split the tokens evenly over the requests."""
        for index in range(size.num_requests):
            yield size.num_tokens * (index + 1) // size.num_requests - size.num_tokens * index // size.num_requests
