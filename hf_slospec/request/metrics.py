"""Latency metrics of requests, and the probability that windows of ten tokens keep an SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.tree.tree import FloatArray

METRICS_PREFIX = "hf_slospec:"  # of metrics for Prometheus
WINDOW = 10  # tokens


def worst_tpot_s(commits: Sequence[Commit]) -> float | None:
    """Return the highest time per token over any :data:`WINDOW` consecutive tokens (SLOs-Serve's
    TPOT, all windows).

    Tokens of one step arrive together, so single gaps (ITL) are bursts.

    Returns:
        Seconds; None for fewer than ``WINDOW + 1`` tokens.
    """
    if not commits or commits[-1].num_emitted <= WINDOW:
        return None
    counts = np.array([commit.num_emitted for commit in commits])
    times = np.array([commit.at_s for commit in commits])
    arrival = times[np.searchsorted(counts, np.arange(1, counts[-1] + 1))]  # [num_tokens] f64
    return float((arrival[WINDOW:] - arrival[:-WINDOW]).max() / WINDOW)


MIN_SHARE = 0.05  # smallest share of an SLO to plan with
PRECISION = 1e-3  # Relative error of the share.
_PACES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)  # Gauss-Hermite quadrature
_WEIGHTS /= _WEIGHTS.sum()


def steps_needed(committed: FloatArray) -> FloatArray:
    """Return the distribution of the number of steps that commit :data:`WINDOW` tokens.

    Args:
        committed: [max_tokens + 1] f64, probabilities of the tokens that a step commits; that of 0
            tokens is 0.

    Returns:
        [WINDOW + 1] f64, probabilities of 0, 1, 2, ... steps.
    """
    below = np.eye(1, WINDOW)[0]  # probabilities of 0, 1, ... tokens in windows that go on
    left = [1.0]  # probability that the window has not ended after so many steps
    for _ in range(WINDOW):
        below = np.convolve(below, committed)[:WINDOW]
        left.append(float(below.sum()))
    return np.concatenate(([0.0], -np.diff(left)))


def window_probability(steps: FloatArray, allowed: FloatArray, variation: float) -> FloatArray:
    """Return the probability that a window is kept.

    Args:
        steps: distribution from :func:`steps_needed`.
        allowed: [...] f64, time of a window by the SLO, in mean steps.
        variation: standard deviation of a step's seconds over their mean; their sums are taken as
            normal.

    Returns:
        [...] f64.
    """
    numbers = np.arange(1, len(steps))
    slack = np.asarray(allowed)[..., None] - numbers
    if variation > 0.0:
        in_time = _normal(slack / (variation * np.sqrt(numbers)))
    else:
        in_time = (slack >= -1e-9).astype(np.float64)
    kept: FloatArray = in_time @ steps[1:]
    return np.clip(kept, 0.0, 1.0)


def _normal(values: FloatArray) -> FloatArray:
    """Return the standard normal distribution function."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    probs: FloatArray = 0.5 + 0.5 * erf(values / math.sqrt(2.0))
    return probs


def kept_probability(
    share: float, committed: FloatArray, variation: float, spread: float, num_tokens: float
) -> float:
    """Return a lower bound of the probability that a request keeps its SLO over every window.

    Args:
        share: mean seconds per token, as a share of the TPOT SLO.
        committed: as for :func:`steps_needed`.
        variation: as for :func:`window_probability`.
        spread: standard deviation of the logarithm of a request's mean seconds per token.
        num_tokens: mean output tokens. The probability is convex in them, so their own variance
            only raises it.
    """
    mean = float(committed @ np.arange(len(committed)))
    allowed = WINDOW / (share * mean) / np.exp(spread * _PACES)
    num_windows = max(num_tokens - WINDOW, 0.0) / mean
    return float(
        _WEIGHTS @ window_probability(steps_needed(committed), allowed, variation) ** num_windows
    )


def planned_share(
    probability: float, committed: FloatArray, variation: float, spread: float, num_tokens: float
) -> float:
    """Return the largest share of a TPOT SLO, at most 1, at which windows are all kept with this
    probability.

    The other arguments are those of :func:`kept_probability`. :data:`MIN_SHARE` is returned if no
    larger one suffices."""
    low = MIN_SHARE
    high = 1.0
    if kept_probability(high, committed, variation, spread, num_tokens) >= probability:
        return high
    while high - low > PRECISION * low:
        share = (low + high) / 2.0
        is_enough = kept_probability(share, committed, variation, spread, num_tokens) >= probability
        low, high = (share, high) if is_enough else (low, share)
    return low


@dataclass(frozen=True)
class RequestMetrics:
    """SLOs and measurements of a request."""

    tpot_slo_s: float | None  # seconds per output token in the last stage; None: no SLO
    tpot_s: float | None  # (last - first token) / (tokens - 1) in seconds; None below two tokens
    ttft_s: float | None  # seconds from arrival to the first token; None before it
    attained: bool | None  # all SLOs were met; None without an SLO or a token
    tokens: int  # committed, the first one included
    steps: int  # verify steps after the prefill
    drafted: int  # draft tokens verified: nodes of all verified trees, roots not counted
    accepted: int  # drafted nodes that were committed
    slack_s: float | None  # seconds that the last token was early by its TPOT SLO; negative: late
    worst_tpot_s: float | None  # highest over 10 consecutive tokens (SLOs-Serve); None below 11
    expected_tokens: float  # tokens that the policy expected of the verify steps
    phases: PhaseTimes  # seconds by phase of the request's steps, which other requests share
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    guaranteed: bool = False  # the batcher guaranteed its SLOs
    preempted: int = 0  # times the batcher preempted the request
    reused: int = 0  # tokens of the prompt whose K/V another request had computed
    resumed: int = 0  # tokens that another engine had committed
    window_guarantee: float | None = None  # probability guaranteed for windows_kept; None: none
    windows_kept: bool | None = None  # all windows of 10 tokens met the TPOT SLO; None without
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    e2e_s: float | None = None  # seconds from arrival to the latest token; None before the first
    acceptance_histogram: tuple[int, ...] = ()  # verify steps that accepted 0 drafted nodes, 1, ...
    earlier: RequestMetrics | None = None  # of the request continued; the pause is in neither

    @property
    def parts(self) -> list[RequestMetrics]:
        """These metrics and those of all requests that this one continues."""
        return [self, *([] if self.earlier is None else self.earlier.parts)]

    @property
    def attained_throughout(self) -> bool | None:
        """Return whether this request and those that it continues attained their SLOs; None without
        any SLO.
        """
        attained = [part.attained for part in self.parts if part.attained is not None]
        return all(attained) if attained else None

    @property
    def guaranteed_throughout(self) -> bool:
        """Return whether the SLOs of all these requests were guaranteed."""
        return all(part.guaranteed for part in self.parts)

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verify step; None if there was no step after prefill."""
        return (self.tokens - 1) / self.steps if self.steps else None
