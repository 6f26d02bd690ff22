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
        """The non-decreasing curve closest to the measurements in least squares (pool adjacent violators)."""
        blocks: list[tuple[float, int]] = []  # (mean, number of points)
        points = sorted(zip(num_tokens, seconds, strict=True))
        for _, mean in points:
            count = 1
            while blocks and blocks[-1][0] > mean:
                last_mean, last_count = blocks.pop()
                mean = (last_mean * last_count + mean * count) / (last_count + count)
                count += last_count
            blocks.append((mean, count))
        monotone = tuple(mean for mean, count in blocks for _ in range(count))
        return cls(tuple(tokens for tokens, _ in points), monotone)

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
