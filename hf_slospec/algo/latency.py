"""Measured step times: monotone piecewise-linear curves, since no line fits real hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_slospec.algo.tree import FloatArray, IntArray


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of one forward by the number of tokens in it; linear between the measured points and beyond the last."""

    num_tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # of each, never falling

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
        """Seconds of forwards of these sizes.  -> as given, f64"""
        x, y, slope = self._line
        inside: FloatArray = np.asarray(np.interp(num_tokens, x, y))
        beyond: FloatArray = np.maximum(np.asarray(num_tokens) - x[-1], 0.0)
        return inside + slope * beyond

    @cached_property
    def _line(self) -> tuple[FloatArray, FloatArray, float]:
        """The points as arrays, and the slope beyond the last."""
        x, y = np.array(self.num_tokens, dtype=np.float64), np.array(self.seconds)
        return x, y, float((y[-1] - y[-2]) / (x[-1] - x[-2])) if len(x) > 1 else 0.0


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one packed forward: a curve in its tokens, and what further requests and the keys they see add."""

    curve: LatencyCurve
    per_request_s: float = 0.0  # of every request after the first
    per_key_s: float = 0.0  # of every cached token that some request attends to

    def __call__(self, num_tokens: IntArray | FloatArray | int, num_requests: int = 1, num_keys: int = 0) -> FloatArray:
        """Seconds; ``num_keys`` are the cached tokens of all requests together.  -> shape of ``num_tokens``, f64"""
        return self.curve(num_tokens) + self.per_request_s * (num_requests - 1) + self.per_key_s * num_keys


class Correction:
    """How much longer forwards took than predicted, lately: a factor by size, in powers of two.

    Sizes that were not met lately follow the others. What is remembered fades, so a machine that slowed down or a
    neighbour that went away is known within some dozen forwards.
    """

    MEMORY = 40.0  # observations
    TRUST = 4.0  # observations of a size that count as much as those of all sizes together
    LIMIT = math.log(4.0)  # one observation counts as no further off than this: it may have met a pause

    def __init__(self) -> None:
        self._logs, self._counts = np.zeros(16), np.zeros(16)  # by rounded log2(tokens); the sums of log ratios
        self._octaves, self._log_factors = np.arange(16.0), np.zeros(16)

    def __call__(self, num_tokens: IntArray | FloatArray | int) -> FloatArray:
        """The factor for forwards of these sizes."""
        octaves = np.log2(np.maximum(num_tokens, 1))
        return np.exp(np.interp(octaves, self._octaves, self._log_factors))  # no jumps between sizes

    def observe(self, num_tokens: int, predicted_s: float, measured_s: float) -> None:
        """``predicted_s`` is the prediction without any correction."""
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        at = _octave(num_tokens)
        now = float(self._log_factors[at])
        observed = float(np.clip(math.log(measured_s / predicted_s), now - self.LIMIT, now + self.LIMIT))
        fade = 1.0 - 1.0 / self.MEMORY
        self._logs *= fade
        self._counts *= fade
        self._logs[at] += observed
        self._counts[at] += 1.0
        overall = self._logs.sum() / self._counts.sum()
        self._log_factors = (self._logs + self.TRUST * overall) / (self._counts + self.TRUST)


def _octave(num_tokens: int) -> int:
    return min(round(math.log2(max(num_tokens, 1))), 15)


class StepCosts:
    """What a step costs, as measured before and corrected while running: draft levels, then one verify forward."""

    def __init__(self, verify: ForwardCost, draft_level: ForwardCost):
        self.verify, self.draft_level = verify, draft_level
        self.verify_correction, self.draft_correction = Correction(), Correction()

    def verify_s(self, num_tokens: IntArray | FloatArray | int, num_requests: int = 1, num_keys: int = 0) -> FloatArray:
        """Seconds of verifying this many nodes, and of everything in a step that is not drafting."""
        return self.verify(num_tokens, num_requests, num_keys) * self.verify_correction(num_tokens)

    def draft_s(self, num_requests: int, depth: IntArray | int, width: IntArray | int, num_keys: int = 0) -> FloatArray:
        """Seconds of drafting: the first level forwards the roots, each further one a beam of every request.

        Depths and widths may be arrays that broadcast.
        """
        return self._draft_s(num_requests, depth, width, num_keys) * self.draft_correction(num_requests * width)

    def level_s(self, num_requests: int, width: int, num_keys: int = 0) -> float:
        """Seconds of one further level."""
        level_s = self.draft_level(num_requests * width, num_requests, num_keys)
        return float(level_s * self.draft_correction(num_requests * width))

    def _draft_s(self, num_requests: int, depth: IntArray | int, width: IntArray | int, num_keys: int) -> FloatArray:
        first_s = self.draft_level(num_requests, num_requests, num_keys)
        level_s = self.draft_level(num_requests * width, num_requests, num_keys)
        return np.where(np.asarray(depth) > 0, first_s + level_s * (np.asarray(depth) - 1), 0.0)

    def observe_verify(self, measured_s: float, num_tokens: int, num_requests: int, num_keys: int) -> None:
        """Take in what a step took without its drafting."""
        predicted_s = float(self.verify(num_tokens, num_requests, num_keys))
        self.verify_correction.observe(num_tokens, predicted_s, measured_s)

    def observe_draft(self, measured_s: float, num_requests: int, depth: int, width: int, num_keys: int) -> None:
        """Take in what drafting took."""
        predicted_s = float(self._draft_s(num_requests, depth, width, num_keys))
        self.draft_correction.observe(num_requests * width, predicted_s, measured_s)
