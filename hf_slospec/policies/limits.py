"""Limits that policies share: depth by remaining tokens, and nodes by the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import FloatArray, TokenTree
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts

MAX_BUDGET = 1024  # tokens
MAX_SLOWDOWN = 4.0  # without a given token budget, a step may take this many times as long as one of a single token


def max_useful_depth(requests: Sequence[Request], max_depth: int) -> int:
    """Return the largest depth up to ``max_depth`` at which some request can commit a whole path: depth + 1 tokens."""
    return min(max_depth, max(request.num_left for request in requests) - 1)


def without_useless_nodes(requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[TokenTree]:
    """Return the candidate trees without nodes that are too deep to be committed within ``max_new_tokens``."""
    return [tree.up_to(request.num_left - 1) for tree, request in zip(candidates, requests, strict=True)]


def affordable_tokens(costs: StepCosts) -> int:
    """Return the maximum tokens whose verify step costs at most :data:`MAX_SLOWDOWN` times a single token's step."""
    times_s = _times_s(costs)
    return int(np.searchsorted(times_s, MAX_SLOWDOWN * times_s[0], side="right"))


def roofline_tokens(costs: StepCosts) -> int:
    """Return the tokens at which the measured roofline has its ridge.

    The roofline is the time of a single token (memory-bound) or the number of tokens at their highest rate
    (compute-bound), whichever is longer. Below the ridge compute is left unused; above it the step takes longer and
    the rate does not rise.
    """
    times_s = _times_s(costs)
    highest_rate = float((np.arange(1, MAX_BUDGET + 1) / times_s).max())
    return max(round(float(times_s[0]) * highest_rate), 1)


def _times_s(costs: StepCosts) -> FloatArray:
    """Return the seconds of verify steps of 1, 2, ... tokens.  -> [MAX_BUDGET] f64"""
    times_s: FloatArray = np.maximum.accumulate(costs.verify_s(np.arange(1, MAX_BUDGET + 1)))
    return times_s  # corrections by size may break monotonicity, hence the maximum
