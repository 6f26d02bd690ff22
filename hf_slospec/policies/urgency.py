"""Weights of requests in the ``auto`` policy: requests that are behind their SLOs, and rows of a
``generate`` call that will end last, weigh more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray

MAX_BEHIND = 2.0  # tokens behind its SLO beyond which a request's weight does not rise further
# Size of a request's cushion, in standard deviations of the tokens that its remaining steps commit
CUSHION = 2.0
# Exponent p of the p-norm that approximates the maximum of the rows' remaining steps. In
# simulations 8 gains a quarter more if all rows emit as many tokens as they may, but loses 4 % if
# the rows that end early are those with low acceptance rates.
END_NORM = 3.0
# Weight of the mean over all rows in a row's tokens per step, in steps of the row; a guess
PRIOR_STEPS = 8


@dataclass(frozen=True)
class SLOProgress:
    """Progress of requests relative to their pace, the seconds per token that their SLOs allow;
    [num_requests] f64 each.

    Seconds and tokens count from the beginning of the request's current stage; the first stage
    begins with the first token."""

    pace_s: FloatArray  # seconds per output token; inf: no SLO
    elapsed_s: FloatArray
    emitted: FloatArray  # tokens
    num_left: FloatArray  # tokens

    def behind(self, step_s: float) -> FloatArray:
        """Return, for each request, the tokens beyond the bonus token that a step of ``step_s``
        seconds must commit to keep the pace; negative if the request is ahead of it.
        """
        return (self.elapsed_s + step_s) / self.pace_s - self.emitted - 1.0

    def needed_rate(self, step_s: float) -> FloatArray:
        """Return, for each request, the tokens per step of ``step_s`` seconds that it needs from
        now on to end on pace; inf if no time is left.
        """
        left_s = self.pace_s * (self.emitted + self.num_left) - self.elapsed_s
        rates = np.full(len(left_s), np.inf)
        np.divide(self.num_left * step_s, left_s, out=rates, where=left_s > 0.0)
        return rates

    def cushion(self, needed_rate: FloatArray, tokens_per_step: float, spread: float) -> FloatArray:
        """Return how many tokens each request should be ahead of its pace, as a reserve for steps
        that commit fewer tokens than the mean.

        The cushion is largest far from the end, where it is also cheapest to build, and smaller for
        looser TPOT SLOs.

        Args:
            needed_rate: result of :meth:`needed_rate`.
            tokens_per_step: mean tokens that one step commits.
            spread: standard deviation of the tokens that one step commits.
        """
        deviation = spread * np.sqrt(self.num_left / max(tokens_per_step, 1.0))
        share = np.minimum(needed_rate / max(tokens_per_step, 1.0), 1.0)
        return CUSHION * share * deviation


def urgency(
    behind: FloatArray, cushion: FloatArray, is_unattainable: BoolArray, strength: float
) -> FloatArray:
    """Return the weights of requests: 1 for a request that is ahead of its TPOT SLO by its cushion,
    more for each token that it lacks.

    Equal weights of 1 maximise tokens per second. Weights below 1, which would leave out requests
    that are far ahead, save little where a step has a large fixed cost, and lose throughput.

    Args:
        behind, cushion: [num_requests] f64, results of :meth:`SLOProgress.behind` and
            :meth:`SLOProgress.cushion`, in tokens.
        is_unattainable: [num_requests] bool, whether the TPOT SLO cannot be met any more; such a
            request has the weight 1, as without an SLO.
        strength: weight that each lacking token adds.

    Returns:
        [num_requests] f64, each at least 1.
    """
    return 1.0 + strength * np.where(
        is_unattainable, 0.0, np.clip(behind + cushion, 0.0, MAX_BEHIND)
    )


def row_weights(requests: Sequence[Request], costs: StepCosts) -> FloatArray:
    """Return the :func:`end_weights` of requests, scaled to a mean of 1.  -> [num_requests] f64

    All weights are 1 if a request has an SLO, returns before the other rows of its call end, or
    makes room for a row of its call that waits.
    """
    if len(requests) == 1 or not all(
        r.params.ends_with_others and r.pace_s is None and r.params.are_all_running()
        for r in requests
    ):
        return np.ones(len(requests))
    one_s = costs.step_s(1)
    row_s = max(costs.step_s(len(requests)) - one_s, 0.0) / (len(requests) - 1)
    # The first token came with the prompt.
    columns = [(r.num_left, r.num_emitted - 1, r.stats.num_steps) for r in requests]
    num_left, committed, num_steps = np.array(columns, np.float64).T
    weights = end_weights(num_left, committed, num_steps, max(one_s - row_s, 0.0), row_s)
    return np.asarray(weights / weights.mean())


def end_weights(
    num_left: FloatArray, committed: FloatArray, num_steps: FloatArray, fixed_s: float, row_s: float
) -> FloatArray:
    """Return, for the rows of a call that returns when its last row ends, the seconds that the call
    saves for each token that the row commits.

    The remaining steps of a row are its tokens left divided by its tokens per step. The call pays
    the fixed part of a step once for every remaining step of its slowest row (here a smooth
    maximum), and the part per row for every remaining step of every row. The weights are the
    gradient of this time. Equal weights, which maximise tokens per second, would spend steps on
    rows that end early anyway.

    Args:
        num_left: tokens that each row may still emit, which stand for the unknown number that it
            will emit, [num_rows] f64.
        committed, num_steps: tokens that decode steps have committed for each row, and the number
            of these steps, [num_rows] f64.
        fixed_s: seconds of a step that do not depend on the number of rows.
        row_s: seconds that one more row adds to a step.

    Returns:
        [num_rows] f64, seconds per token.
    """
    mean_rate = (committed.sum() + 1.0) / (num_steps.sum() + 1.0)
    rates = (committed + PRIOR_STEPS * mean_rate) / (num_steps + PRIOR_STEPS)
    steps_left = num_left / rates
    longest = steps_left.max()
    norm = longest * ((steps_left / longest) ** END_NORM).sum() ** (1.0 / END_NORM)
    seconds: FloatArray = (fixed_s * (steps_left / norm) ** (END_NORM - 1.0) + row_s) / rates
    return seconds
