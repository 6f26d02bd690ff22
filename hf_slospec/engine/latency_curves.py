"""Measured forward times as monotone piecewise-linear curves, since no line fits real hardware."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_slospec.forks import cached_property
from hf_slospec.tree.tree import FloatArray

Count = npt.NDArray[Any] | float  # numbers of tokens, requests, levels
Seconds = Any  # a float for single numbers, which is much faster, else f64 of the broadcast shape


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

    def __call__(self, num_tokens: Count) -> Seconds:
        """Return the seconds of forwards of these sizes; a single number takes a tenth of the time."""
        if not isinstance(num_tokens, float | int):
            x, y, slope = self._line
            beyond = np.maximum(num_tokens - x[-1], 0.0)
            return np.interp(num_tokens, x, y) + slope * beyond
        sizes = self.num_tokens
        seconds = self.seconds
        if num_tokens <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_right(sizes, num_tokens), len(sizes) - 1)
        left = right - (num_tokens < sizes[-1])  # from the last point on: extrapolate from it
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[left] + slope * (num_tokens - sizes[left])

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
        num_tokens: Count,
        num_requests: Count = 1,
        num_keys: Count = 0,
    ) -> Seconds:
        """Return seconds; ``num_keys`` are the cached tokens of all requests together."""
        return (
            self.curve(num_tokens)
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


class SizeCorrection:
    """Ratio of measured to profiled seconds of recent forwards, by the forward's size in powers of
    two.

    A size that was not observed lately follows the average over all sizes. Observations fade, so a
    change of the machine's speed is learned within some dozens of forwards.
    """

    MEMORY = 40.0  # observations
    TRUST = 4.0  # observations of one size that weigh as much as the average over all sizes
    # Largest step of one observation, in log ratio: it may contain a pause of the machine.
    LIMIT = math.log(4.0)

    def __init__(self) -> None:
        self.path = ""  # on which the forwards were measured
        self._octaves = np.arange(16.0)
        self.reset()

    def reset(self) -> None:
        """Drop all observations."""
        # by rounded log2(tokens): sums of log ratios, weights
        self._logs, self._counts = np.zeros((2, 16))
        self._log_sum = self._count_sum = 0.0  # as _logs and _counts, over all sizes
        self._log_factors = np.zeros(16)

    def __call__(self, num_tokens: Count) -> Any:
        """Return the factor for forwards of these sizes, interpolated between the powers of two."""
        if not isinstance(num_tokens, float | int):
            octaves = np.log2(np.maximum(num_tokens, 1))
            return np.exp(np.interp(octaves, self._octaves, self._log_factors))
        octave = min(math.log2(max(num_tokens, 1.0)), 15.0)
        below = self._log_factors[int(octave)]
        above = self._log_factors[math.ceil(octave)]
        return math.exp(below + (octave - int(octave)) * (above - below))

    @property
    def overall_log(self) -> float:
        """Average log ratio over all sizes; 0 before any observation."""
        return self._log_sum / self._count_sum if self._count_sum else 0.0

    def observe(self, num_tokens: int, profiled_s: float, measured_s: float) -> None:
        """Learn from one forward; ``profiled_s`` is the profile's prediction without any
        correction.
        """
        octave = min(round(math.log2(max(num_tokens, 1))), 15)
        current = float(self._log_factors[octave])
        log_ratio = min(
            max(math.log(measured_s / profiled_s), current - self.LIMIT), current + self.LIMIT
        )
        fade = 1.0 - 1.0 / self.MEMORY
        self._logs *= fade
        self._counts *= fade
        self._logs[octave] += log_ratio
        self._counts[octave] += 1.0
        self._log_sum = fade * self._log_sum + log_ratio
        self._count_sum = fade * self._count_sum + 1.0
        self._log_factors = (self._logs + self.TRUST * self.overall_log) / (
            self._counts + self.TRUST
        )


class DraftCorrection:
    """Seconds of drafting as ``constant_s + factor * profiled_s``: least squares on relative
    errors, with fading.

    The constant is what a drafting step costs whatever its depth (building trees, copies, host
    time). Both start from a prior of 0 and 1.
    """

    MEMORY = 40.0  # observations
    PRIOR = 2.0  # initial weight, in observations, of the prior factor 1
    RIDGE = 0.5  # weight, in observations, of the prior constant 0
    # Largest ratio of one observation to the current prediction: it may contain a pause of the
    # machine
    LIMIT = 4.0

    def __init__(self) -> None:
        self.constant_s = 0.0
        self.factor = 1.0
        # Sums of 1, u, u u, v, u v with u = 1 / profiled_s and v = measured_s / profiled_s, from
        # the prior on.
        self._sums = [self.PRIOR, 0.0, 0.0, self.PRIOR, 0.0]

    def __call__(self, profiled_s: Seconds) -> Seconds:
        """Return corrected seconds; a profiled 0 stays 0."""
        return (self.constant_s + self.factor * profiled_s) * (profiled_s > 0.0)

    def observe(self, profiled_s: float, measured_s: float) -> None:
        """Learn from one step's drafting."""
        predicted_s = self(profiled_s)
        measured_s = min(max(measured_s, predicted_s / self.LIMIT), predicted_s * self.LIMIT)
        u = 1.0 / profiled_s
        v = measured_s / profiled_s
        fade = 1.0 - 1.0 / self.MEMORY
        self._sums = [
            fade * old + new for old, new in zip(self._sums, (1.0, u, u * u, v, u * v), strict=True)
        ]
        count, sum_u, sum_uu, sum_v, sum_uv = self._sums
        ridged_uu = sum_uu * (1.0 + self.RIDGE / count)
        determinant = count * ridged_uu - sum_u * sum_u  # positive, as sum_u^2 <= count * sum_uu
        factor = (sum_v * ridged_uu - sum_u * sum_uv) / determinant
        constant_s = (count * sum_uv - sum_u * sum_v) / determinant
        if constant_s < 0.0 or factor < 0.0:
            factor = sum_v / count
            constant_s = 0.0
        self.factor = factor
        self.constant_s = constant_s
