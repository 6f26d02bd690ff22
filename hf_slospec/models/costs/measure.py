"""What a model's packed forwards cost, by trying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.engine.request import Request
from hf_slospec.models.kv_cache.sequences import Sequences
from hf_slospec.models.packed import PackedModel

KEYS = 128  # cached tokens that each measured request attends to, unless said otherwise


@dataclass(frozen=True, order=True)
class Size:
    """The size of a forward: tokens over requests, each of which attends to its own cached tokens."""

    num_tokens: int
    num_requests: int = 1
    keys_each: int = KEYS

    @property
    def num_keys(self) -> int:
        return self.num_requests * self.keys_each


# What is measured, most needed first. Large sizes are left out where half as many tokens cost WORTHWHILE times one.
CURVE = tuple(Size(tokens) for tokens in (1, 16, 64, 4, 32, 8, 2, 128, 256, 512))
SLOPES = (Size(16, 4), Size(16, 1, 1024))  # what requests add, and what keys add, to the 16 tokens of the curve
HELD_OUT = (Size(3), Size(12, 4), Size(24, 8), Size(48, 2, 512), Size(96))  # to judge the fit by
WORTHWHILE = 4.0
MAX_PER_REQUEST = 0.1  # of the time of 16 tokens
REPEATS = 4


@dataclass
class Measured:
    """Fastest seconds by size: a busy machine only adds time."""

    seconds: dict[Size, float] = field(default_factory=dict)

    def add(self, size: Size, seconds: float) -> None:
        self.seconds[size] = min(seconds, self.seconds.get(size, seconds))

    def fit(self) -> ForwardCost:
        """A monotone curve in tokens, with linear terms for further requests and for the keys they see.

        A pause during one of the few forwards the terms are read from must not make them absurd, so they are bounded by
        what a single token costs.
        """
        at_16, many, long = (self.seconds.get(size) for size in (Size(16), *SLOPES))
        per_key_s = per_request_s = 0.0
        if at_16 is not None and long is not None:
            per_key_s = min(max(long - at_16, 0.0), at_16) / (SLOPES[1].num_keys - KEYS)
        if at_16 is not None and many is not None:
            extra_s = many - at_16 - per_key_s * (SLOPES[0].num_keys - KEYS)
            per_request_s = min(max(extra_s, 0.0) / (SLOPES[0].num_requests - 1), MAX_PER_REQUEST * at_16)
        points = {size.num_tokens: s - per_key_s * KEYS for size, s in self.seconds.items() if size in CURVE}
        return ForwardCost(LatencyCurve.fit(list(points), list(points.values())), per_request_s, per_key_s)

    def errors(self, cost: ForwardCost) -> dict[Size, float]:
        """Relative error of a fit at the held-out sizes; positive where it predicts too much."""
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
    """Time forwards of many sizes in rounds for about ``limit_s`` seconds; a slow model is known at fewer sizes."""
    measured = Measured()
    sizes = [*CURVE[:3], *SLOPES, *CURVE[3:], *(HELD_OUT if held_out else ())]
    forward_s = Forwards(packed)
    forward_s(Size(1))  # pays one-off costs
    started_s = time.perf_counter()
    for repeat in range(repeats):
        for size in sizes:
            is_needed = repeat == 0 and size in CURVE[:3]
            if is_needed or (time.perf_counter() - started_s < limit_s and _is_worthwhile(size, measured)):
                measured.add(size, forward_s(size))
                on_forward(size)
    return measured


def _is_worthwhile(size: Size, measured: Measured) -> bool:
    smaller = [known for known in CURVE if known in measured.seconds and 2 * known.num_tokens <= size.num_tokens]
    return size.num_tokens <= 64 or measured.seconds[max(smaller)] < WORTHWHILE * measured.seconds[Size(1)]


class Forwards:
    """Seconds of a packed forward of a given size, in one pool that fits all of them."""

    def __init__(self, packed: PackedModel, max_nodes: int = CURVE[-1].num_tokens):
        """``max_nodes``: tokens of one request at most."""
        self.packed, self.max_nodes = packed, max_nodes
        self._room: dict[tuple[int, int], tuple[Sequences, list[Request]]] = {}
        self._captured: set[Size] = set()

    def __call__(self, size: Size) -> float:
        if size not in self._captured and self._made(size)[0].pool.graphs is not None:
            self._captured.add(size)
            self._forward(size)  # steps will replay it
        return self._forward(size)

    def _forward(self, size: Size) -> float:
        sequences, requests = self._made(size)
        device = self.packed.device
        begun_s = time.perf_counter()
        parts = [sequences.chain(r, [0] * n) for r, n in zip(requests, self._split(size), strict=True)]
        sequences.forward(parts, torch.arange(size.num_tokens))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    def _made(self, size: Size) -> tuple[Sequences, list[Request]]:
        key = size.num_requests, size.keys_each
        if key not in self._room:
            requests = [Request(i, [0] * size.keys_each, max_new_tokens=0) for i in range(size.num_requests)]
            sequences = Sequences(self.packed, max_nodes=self.max_nodes)
            sequences.reserve(requests)
            if sequences.pool.graphs is not None:
                sequences.pool.graphs.patience = 0
            for request in requests:
                sequences.of(request).length = size.keys_each
            self._room[key] = sequences, requests
        return self._room[key]

    @staticmethod
    def _split(size: Size) -> Iterator[int]:
        for index in range(size.num_requests):
            yield size.num_tokens * (index + 1) // size.num_requests - size.num_tokens * index // size.num_requests
