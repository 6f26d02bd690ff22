"""Measured forward times as monotone piecewise-linear curves, since no line fits real hardware."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.forks import cached_property
from hf_slospec.tree.tree import FloatArray, IntArray


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of one forward by its number of tokens; linear between the measured points and beyond
    the last.
    """

    num_tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # one per size, never falling

    @classmethod
    def fit(cls, num_tokens: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
        """Return the non-decreasing curve closest to the measurements in least squares (pool
        adjacent violators).
        """
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

    def __call__(self, num_tokens: IntArray | FloatArray | float) -> FloatArray:
        """Return the seconds of forwards of these sizes.  -> f64, shape of ``num_tokens``"""
        x, y, slope = self._line
        inside: FloatArray = np.asarray(np.interp(num_tokens, x, y))
        beyond: FloatArray = np.maximum(np.asarray(num_tokens) - x[-1], 0.0)
        return inside + slope * beyond

    def at(self, num_tokens: float) -> float:
        """Return the seconds of one forward, as a call does, in a tenth of the time."""
        x = self.num_tokens
        y = self.seconds
        if num_tokens <= x[0] or len(x) == 1:
            return y[0]
        right = min(bisect_right(x, num_tokens), len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        return y[right - 1] + slope * (num_tokens - x[right - 1])

    @cached_property
    def _line(self) -> tuple[FloatArray, FloatArray, float]:
        """Tokens and seconds as arrays, and the slope beyond the last point."""
        x = np.array(self.num_tokens, dtype=np.float64)
        y = np.array(self.seconds)
        return x, y, float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one packed forward: a curve in its tokens, and linear terms in requests and keys."""

    curve: LatencyCurve
    per_request_s: float = 0.0  # seconds per request after the first
    per_key_s: float = 0.0  # seconds per cached token that some request attends to

    def __call__(
        self,
        num_tokens: IntArray | FloatArray | float,
        num_requests: IntArray | FloatArray | float = 1,
        num_keys: IntArray | FloatArray | float = 0,
    ) -> FloatArray:
        """Return seconds; ``num_keys`` are the cached tokens of all requests together.  -> shape of
        ``num_tokens``
        """
        seconds: FloatArray = (
            self.curve(num_tokens)
            + self.per_request_s * (num_requests - 1)
            + self.per_key_s * num_keys
        )
        return seconds

    def at(self, num_tokens: float, num_requests: float = 1, num_keys: float = 0) -> float:
        """Return the seconds of one forward, as a call does, but faster."""
        return (
            self.curve.at(num_tokens)
            + self.per_request_s * (num_requests - 1)
            + self.per_key_s * num_keys
        )

    def scaled(self, factors: Sequence[float], overall: float) -> ForwardCost:
        """Return the cost with each measured point times its factor, and the linear terms times
        ``overall``.
        """
        seconds = [
            point_s * factor for point_s, factor in zip(self.curve.seconds, factors, strict=True)
        ]
        curve = LatencyCurve.fit(self.curve.num_tokens, seconds)
        return ForwardCost(curve, self.per_request_s * overall, self.per_key_s * overall)
