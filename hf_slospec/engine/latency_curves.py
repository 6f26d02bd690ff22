"""Forward times as monotone piecewise-linear curves in the number of tokens, and the corrections of
profiled times by measured ones.
"""

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

Count = npt.NDArray[Any] | float  # number of tokens, requests, levels or nodes, or an array of them
Seconds = Any  # a float if all counts are plain numbers, which is much faster, else an f64 array


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of one forward as a function of its number of tokens: linear between the measured
    points, and beyond the last one.
    """

    num_tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # one per entry of num_tokens, non-decreasing

    @classmethod
    def fit(cls, num_tokens: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
        """Return the non-decreasing curve that is closest to the measurements in least squares
        (pool adjacent violators).
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
        """Return the seconds of forwards of these sizes. A plain number takes a tenth of the time
        of an array.
        """
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
        """Tokens and seconds of the points as arrays, and the slope beyond the last point."""
        x = np.array(self.num_tokens, dtype=np.float64)
        y = np.array(self.seconds)
        return x, y, float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one packed forward: a curve in its number of tokens, plus linear terms in requests
    and cached tokens.
    """

    curve: LatencyCurve
    per_request_s: float = 0.0  # seconds per request after the first
    per_key_s: float = 0.0  # seconds per cached token, summed over requests

    def __call__(
        self,
        num_tokens: Count,
        num_requests: Count = 1,
        num_keys: Count = 0,
    ) -> Seconds:
        """Return the seconds of a forward; ``num_keys`` is the number of cached tokens of all
        requests together.
        """
        return (
            self.curve(num_tokens)
            + self.per_request_s * (num_requests - 1)
            + self.per_key_s * num_keys
        )

    def scaled(self, factors: Sequence[float], overall: float) -> ForwardCost:
        """Return the cost with each measured point multiplied by its entry of ``factors``, and the
        linear terms by ``overall``.
        """
        seconds = [
            point_s * factor for point_s, factor in zip(self.curve.seconds, factors, strict=True)
        ]
        curve = LatencyCurve.fit(self.curve.num_tokens, seconds)
        return ForwardCost(curve, self.per_request_s * overall, self.per_key_s * overall)


class SizeCorrection:
    """Ratio of measured to profiled seconds of recent forwards, for each power of two of the
    forward's number of tokens.

    A size without recent observations gets the average over all sizes. Observations fade, so that a
    change of the machine's speed is learned within some dozens of forwards.

    With ``keeps_sizes``, what was observed of a size is kept however long ago, for policies
    that compare sizes of which most are rare. The log ratios are then estimated by a Kalman filter:
    that of each power of two differs from the one below by an unknown amount, and all change
    together with the machine's speed.
    """

    MEMORY = 40.0  # number of observations over which ratios are averaged
    TRUST = 4.0  # number of observations of one size that weigh as much as the overall average
    # Largest difference of an observed log ratio from the current one; larger ones are clipped, as
    # the machine may have paused.
    LIMIT = math.log(4.0)
    # Standard deviations of log ratios: of one observation, of the ratio of all sizes before the
    # first one, of the change from one power of two to the next, and of the change of the machine's
    # speed from one forward to the next
    NOISE = 0.2
    COMMON = 2.0
    SIZE = 0.3
    DRIFT = 0.01

    def __init__(self, keeps_sizes: bool = False) -> None:
        self.keeps_sizes = keeps_sizes
        self.path = ""  # Target.path on which the forwards were measured
        self._octaves = np.arange(16.0)  # log2 of the forward sizes that have an entry
        self.reset()

    def reset(self) -> None:
        """Drop all observations."""
        # Per rounded log2(num_tokens), with fading: sum of log ratios, and sum of weights.
        self._logs, self._counts = np.zeros((2, 16))
        self._log_sum = self._count_sum = 0.0  # sums of _logs and of _counts over all sizes
        self._log_factors = np.zeros(16)
        between = np.minimum.outer(self._octaves, self._octaves)
        # [16, 16] f64, covariance of the errors of _log_factors; of use with keeps_sizes only
        self._covariance = self.COMMON**2 + self.SIZE**2 * between

    def __call__(self, num_tokens: Count) -> Any:
        """Return the factors for forwards of these sizes, interpolated between the powers of
        two.
        """
        if not isinstance(num_tokens, float | int):
            octaves = np.log2(np.maximum(num_tokens, 1))
            return np.exp(np.interp(octaves, self._octaves, self._log_factors))
        octave = min(math.log2(max(num_tokens, 1.0)), 15.0)
        below = self._log_factors[int(octave)]
        above = self._log_factors[math.ceil(octave)]
        return math.exp(below + (octave - int(octave)) * (above - below))

    @property
    def overall_log(self) -> float:
        """Average log ratio over all sizes; 0 before the first observation."""
        return self._log_sum / self._count_sum if self._count_sum else 0.0

    def observe(self, num_tokens: int, profiled_s: float, measured_s: float) -> None:
        """Update the ratios from one forward.

        Args:
            num_tokens: tokens of the forward.
            profiled_s: seconds that the profile predicts without any correction.
            measured_s: seconds that the forward took.
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
        if self.keeps_sizes:
            row = self._covariance[octave].copy()
            gains = row / (row[octave] + self.NOISE**2)
            self._log_factors += gains * (log_ratio - current)
            self._covariance += self.DRIFT**2 - np.multiply.outer(gains, row)
            return
        self._log_factors = (self._logs + self.TRUST * self.overall_log) / (
            self._counts + self.TRUST
        )


class DraftCorrection:
    """Corrects profiled seconds of drafting to ``constant_s + factor * profiled_s``, by least
    squares on relative errors of recent steps.

    The constant is what a drafting step costs whatever its depth (building trees, copies, host
    time). The prior is a factor of 1 and a constant of 0. Observations fade.
    """

    MEMORY = 40.0  # number of observations over which the fit averages
    PRIOR = 2.0  # initial weight, in observations, of the prior factor 1
    RIDGE = 0.5  # constant weight, in observations, of the prior constant 0
    # Largest ratio of a measured time to the predicted one; larger ones are clipped, as the machine
    # may have paused.
    LIMIT = 4.0

    def __init__(self) -> None:
        self.constant_s = 0.0
        self.factor = 1.0
        # Fading sums of 1, u, u u, v, u v with u = 1 / profiled_s and v = measured_s / profiled_s;
        # they start with the prior.
        self._sums = [self.PRIOR, 0.0, 0.0, self.PRIOR, 0.0]

    def __call__(self, profiled_s: Seconds) -> Seconds:
        """Return the corrected seconds; 0 stays 0."""
        return (self.constant_s + self.factor * profiled_s) * (profiled_s > 0.0)

    def observe(self, profiled_s: float, measured_s: float) -> None:
        """Update factor and constant from the drafting of one step."""
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
        determinant = count * ridged_uu - sum_u * sum_u  # positive: sum_u^2 <= count * sum_uu
        factor = (sum_v * ridged_uu - sum_u * sum_uv) / determinant
        constant_s = (count * sum_uv - sum_u * sum_v) / determinant
        if constant_s < 0.0 or factor < 0.0:
            factor = sum_v / count
            constant_s = 0.0
        self.factor = factor
        self.constant_s = constant_s
