"""Step times of real models, from a short warm-up measurement."""

from __future__ import annotations

import time

import torch

from hf_slospec.algo.latency import LatencyCurve
from hf_slospec.engine.request import Request
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.sequences import Sequences

COARSE = (1, 16, 64)  # measured once at least, however slow the model
FINE = (4, 32, 8, 2)  # while time is left
LARGE = (128, 256)  # the same, and only if half as many tokens cost less than WORTHWHILE times a single one
WORTHWHILE = 4.0
REPEATS = 4
PREFIX_LEN = 128  # committed tokens the measured ones attend to


def measure_curve(packed: PackedModel, limit_s: float) -> LatencyCurve:
    """Time forwards by their number of tokens, for about ``limit_s`` seconds; a slow model is known at fewer sizes.

    The fastest of several rounds over all sizes counts: a busy machine only adds time, to whatever size it meets.
    """
    probe = Request(0, [0] * PREFIX_LEN, max_new_tokens=0)
    sequences = Sequences(packed, [probe], max_nodes=max(LARGE))
    sequences.of(probe).length = PREFIX_LEN
    _forward_s(sequences, probe, 1)  # pays one-off costs
    started_s = time.perf_counter()
    times: dict[int, list[float]] = {size: [] for size in COARSE + FINE + LARGE}
    for repeat in range(REPEATS):
        for size, own in times.items():
            if size in LARGE and not (times[size // 2] and min(times[size // 2]) < WORTHWHILE * min(times[1])):
                continue
            is_needed = repeat == 0 and size in COARSE
            if is_needed or time.perf_counter() - started_s < limit_s:
                own.append(_forward_s(sequences, probe, size))
    fastest = {size: min(own) for size, own in times.items() if own}
    return LatencyCurve.fit(list(fastest), list(fastest.values()))


def _forward_s(sequences: Sequences, request: Request, num_tokens: int) -> float:
    """Seconds of one forward of a chain of tokens behind the request's cached ones."""
    device = sequences.packed.device
    begun_s = time.perf_counter()
    sequences.forward([sequences.chain(request, [0] * num_tokens)], torch.arange(num_tokens, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s
