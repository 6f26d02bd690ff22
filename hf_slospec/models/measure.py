"""Step times of real models, from a short warm-up measurement."""

from __future__ import annotations

import time

import numpy as np
import torch

from hf_slospec.algo.latency import LatencyCurve, StepCosts
from hf_slospec.models.kv_pool import CachedSequence, KVPool
from hf_slospec.models.packed import Fresh, PackedModel

NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 3
PREFIX_LEN = 128  # committed tokens the measured ones attend to


def measure_step_costs(target: PackedModel, draft: PackedModel | None, limit_s: float = 3.0) -> StepCosts:
    """Time forwards of either model by their number of tokens, for about ``limit_s`` seconds at most.

    A model so slow that the time runs out is known up to the sizes measured; the curve goes on as a line. Without a
    draft model, drafting costs nothing.
    """
    free = LatencyCurve((1,), (0.0,))
    return StepCosts(measure_curve(target, limit_s * 0.8), measure_curve(draft, limit_s * 0.2) if draft else free)


def measure_curve(packed: PackedModel, limit_s: float) -> LatencyCurve:
    pool = packed.new_pool(PREFIX_LEN + max(NUM_TOKENS))
    sequence = pool.allocate(pool.num_slots)
    sequence.length = PREFIX_LEN
    started_s = time.perf_counter()
    sizes, medians = list[int](), list[float]()
    for num_tokens in NUM_TOKENS:
        times = []
        for repeat in range(REPEATS + (num_tokens == 1)):  # the very first forward also pays one-off costs
            begun_s = time.perf_counter()
            _forward_chain(packed, pool, sequence, num_tokens)
            times.append(time.perf_counter() - begun_s)
            if repeat and time.perf_counter() - started_s > limit_s:
                break
        sizes.append(num_tokens)
        medians.append(float(np.median(times[num_tokens == 1 :])))
        if time.perf_counter() - started_s > limit_s:
            break
    return LatencyCurve.fit(sizes, medians)


def _forward_chain(packed: PackedModel, pool: KVPool, sequence: CachedSequence, num_tokens: int) -> None:
    device = packed.device
    positions = packed.inside(sequence.length + torch.arange(num_tokens, device=device))
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    packed.forward(pool, [Fresh(sequence, tokens, positions, mask)], torch.arange(num_tokens, device=device))
    sequence.num_staged = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
