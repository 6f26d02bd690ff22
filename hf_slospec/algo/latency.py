"""Measured step times: monotone piecewise-linear curves, since no line fits real hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import FloatArray, IntArray


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of one forward by the number of tokens in it; linear between the measured points and beyond the last."""

    num_tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]

    @classmethod
    def fit(cls, num_tokens: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
        """Through measured points; where noise made more tokens look cheaper, the higher earlier time holds."""
        order = np.argsort(num_tokens, kind="stable")
        monotone = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64)[order])
        return cls(tuple(int(num_tokens[i]) for i in order), tuple(float(s) for s in monotone))

    def __call__(self, num_tokens: IntArray | FloatArray | int) -> FloatArray:
        x, y = np.array(self.num_tokens, dtype=np.float64), np.array(self.seconds)
        inside: FloatArray = np.asarray(np.interp(num_tokens, x, y))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        beyond: FloatArray = np.maximum(np.asarray(num_tokens) - x[-1], 0.0)
        return inside + slope * beyond


@dataclass(frozen=True)
class StepCosts:
    """What a step costs: draft levels by their tokens, then one verify forward by its nodes."""

    verify: LatencyCurve
    draft_level: LatencyCurve

    def draft_s(self, num_requests: int, depth: int, width: int) -> float:
        """Seconds of drafting: the first level forwards the roots, each further one a beam of every request."""
        if depth == 0:
            return 0.0
        beams = float(self.draft_level(num_requests * width)) * (depth - 1)
        return float(self.draft_level(num_requests)) + beams
