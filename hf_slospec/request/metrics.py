"""``RequestMetrics``, the latency metrics of one request, and the probability that it keeps its
TPOT SLO over every window of ten tokens. Metrics of the whole batcher are in ``batcher/stats.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.request.tables import PrintsAsTable, shown
from hf_slospec.tree.tree import FloatArray

METRICS_PREFIX = "hf_slospec:"  # prefix of the names of Prometheus metrics
WINDOW = 10  # tokens per window over which the TPOT SLO is checked, as in SLOs-Serve


def worst_tpot_s(commits: Sequence[Commit]) -> float | None:
    """Return the highest time per token over any :data:`WINDOW` consecutive tokens (SLOs-Serve's
    TPOT, all windows).

    Gaps between single tokens (ITL) would say little, since the tokens of one step arrive together.

    Returns:
        Seconds; None for fewer than ``WINDOW + 1`` tokens.
    """
    if not commits or commits[-1].num_emitted <= WINDOW:
        return None
    counts = np.array([commit.num_emitted for commit in commits])
    times = np.array([commit.at_s for commit in commits])
    arrival = times[np.searchsorted(counts, np.arange(1, counts[-1] + 1))]  # [num_tokens] f64
    return float((arrival[WINDOW:] - arrival[:-WINDOW]).max() / WINDOW)


MIN_SHARE = 0.05  # smallest share of a TPOT SLO that steps are planned with
PRECISION = 1e-3  # relative error of the planned share
# Points and weights of Gauss-Hermite quadrature over the standard normal distribution, for means
# over requests, whose log seconds per token are assumed to be normally distributed.
_PACES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_WEIGHTS /= _WEIGHTS.sum()


def steps_needed(committed: FloatArray) -> FloatArray:
    """Return the distribution of the number of steps that commit :data:`WINDOW` tokens.

    Args:
        committed: [max_tokens + 1] f64, probability that a step commits 0, 1, 2, ... tokens; the
            entry of 0 tokens is 0.

    Returns:
        [WINDOW + 1] f64, probability that 0, 1, 2, ... steps are needed.
    """
    # Probabilities that the steps so far committed 0, 1, ..., WINDOW - 1 tokens.
    below = np.eye(1, WINDOW)[0]
    left = [1.0]  # probability that the window has not ended after 0, 1, ... steps
    for _ in range(WINDOW):
        below = np.convolve(below, committed)[:WINDOW]
        left.append(float(below.sum()))
    return np.concatenate(([0.0], -np.diff(left)))


def window_probability(steps: FloatArray, allowed: FloatArray, variation: float) -> FloatArray:
    """Return the probability that a window of :data:`WINDOW` tokens meets its SLO.

    Args:
        steps: distribution of the number of steps of a window, from :func:`steps_needed`.
        allowed: [...] f64, time that the SLO allows for a window, in mean step times.
        variation: standard deviation of step times divided by their mean; sums of step times are
            assumed to be normally distributed.

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
    """Return the cumulative distribution function of the standard normal distribution."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    probs: FloatArray = 0.5 + 0.5 * erf(values / math.sqrt(2.0))
    return probs


def kept_probability(
    share: float, committed: FloatArray, variation: float, spread: float, num_tokens: float
) -> float:
    """Return a lower bound of the probability that a request meets its TPOT SLO in every window.

    Args:
        share: mean seconds per token, as a share of the TPOT SLO.
        committed: see :func:`steps_needed`.
        variation: see :func:`window_probability`.
        spread: standard deviation, over requests, of the logarithm of their mean seconds per token.
        num_tokens: mean number of output tokens. The probability is convex in it, so that its own
            variance can only raise the probability.
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
    """Return the largest share of a TPOT SLO, at most 1, with which all windows meet the SLO with
    at least ``probability``.

    :data:`MIN_SHARE` is returned if no larger share suffices. The other arguments are as in
    :func:`kept_probability`.
    """
    low = MIN_SHARE
    high = 1.0
    if kept_probability(high, committed, variation, spread, num_tokens) >= probability:
        return high
    while high - low > PRECISION * low:
        share = (low + high) / 2.0
        is_enough = kept_probability(share, committed, variation, spread, num_tokens) >= probability
        low, high = (share, high) if is_enough else (low, share)
    return low


@dataclass(frozen=True, repr=False)
class RequestMetrics(PrintsAsTable):
    """SLOs and measurements of a request; prints as a table of the main ones."""

    tpot_slo_s: float | None  # seconds per output token in the last stage; None: no SLO
    tpot_s: float | None  # (last - first token) / (tokens - 1) in seconds; None below two tokens
    ttft_s: float | None  # seconds from arrival to the first token; None before it
    attained: bool | None  # all SLOs were met; None: no SLO, or no token yet
    tokens: int  # committed tokens, the first one included
    steps: int  # decode steps; steps that prefill are not counted
    drafted: int  # draft tokens verified: nodes of all verified trees, roots excluded
    accepted: int  # draft tokens accepted
    slack_s: float | None  # seconds that the last token was early by its TPOT SLO; negative: late
    worst_tpot_s: float | None  # highest over 10 consecutive tokens; None below 11 tokens
    expected_tokens: float  # tokens that the policy predicted for the decode steps
    phases: PhaseTimes  # seconds by phase of all steps with this request, shared with other ones
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    guaranteed: bool = False  # the batcher guaranteed the SLOs
    preempted: int = 0  # number of times that the batcher preempted the request
    reused: int = 0  # prompt tokens whose K/V was reused from another request
    resumed: int = 0  # tokens that another engine had committed
    # Guaranteed probability of windows_kept; None: no guarantee.
    window_guarantee: float | None = None
    windows_kept: bool | None = None  # all windows of 10 tokens met the TPOT SLO; None: no SLO
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    e2e_s: float | None = None  # seconds from arrival to the latest token; None before the first
    acceptance_histogram: tuple[
        int, ...
    ] = ()  # number of decode steps that accepted 0, 1, ... nodes
    # Metrics of the request that this one continues; the pause in between counts in neither.
    earlier: RequestMetrics | None = None

    @property
    def parts(self) -> list[RequestMetrics]:
        """The metrics of this request and of all requests that it continues."""
        return [self, *([] if self.earlier is None else self.earlier.parts)]

    @property
    def attained_throughout(self) -> bool | None:
        """Return whether this request and all requests that it continues attained their SLOs; None
        if none of them has an SLO.
        """
        attained = [part.attained for part in self.parts if part.attained is not None]
        return all(attained) if attained else None

    @property
    def guaranteed_throughout(self) -> bool:
        """Return whether the SLOs of this request and of all requests that it continues were
        guaranteed.
        """
        return all(part.guaranteed for part in self.parts)

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per decode step; None if no step followed the prefill."""
        return (self.tokens - 1) / self.steps if self.steps else None

    def _table(self) -> list[tuple[str, ...]]:
        return MetricsOfRows([self])._table()

    def __repr__(self) -> str:
        """Return the table's cells in one line, for lists of metrics."""
        _, *columns = zip(*self._table(), strict=True)
        cells = (f"{name} {cell}" for name, cell in columns if cell != "-")
        return f"<RequestMetrics: {', '.join(cells)}>"

    def __str__(self) -> str:
        return super().__repr__()


COLUMNS = (
    *("row", "tokens", "SLO ms/token", "ms/token", "first token ms", "attained"),
    *("steps", "tokens/step", "drafted", "accepted"),
)


class MetricsOfRows(PrintsAsTable, list[RequestMetrics]):
    """The metrics of the rows of one call; a list that prints as a table."""

    def _table(self) -> list[tuple[str, ...]]:
        cells = [
            (
                str(row),
                str(metrics.tokens),
                shown(metrics.tpot_slo_s, 1, 1e3),
                shown(metrics.tpot_s, 1, 1e3),
                shown(metrics.ttft_s, 1, 1e3),
                {None: "-", True: "yes", False: "no"}[metrics.attained],
                str(metrics.steps),
                shown(metrics.acceptance_length, 2),
                str(metrics.drafted),
                str(metrics.accepted),
            )
            for row, metrics in enumerate(self)
        ]
        return [COLUMNS, *cells]
