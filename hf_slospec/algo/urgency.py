"""Weights of requests' tokens, by how late the requests are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray

MAX_LATE = 2.0  # tokens of lateness beyond which the weight rises no more
CUSHION = 2.0  # standard deviations of the tokens that a request's remaining steps commit


@dataclass(frozen=True)
class SLOProgress:
    """Progress of requests against their TPOT SLOs, [num_requests] f64 each.

    Seconds and tokens count from the beginning of the stage of the TPOT SLO, at the earliest from the first token.
    """

    tpot_slo_s: FloatArray  # seconds per output token; inf: no TPOT SLO
    elapsed_s: FloatArray
    emitted: FloatArray  # tokens
    num_left: FloatArray  # tokens

    def late(self, step_s: float) -> FloatArray:
        """Return the tokens needed of a step of this length beyond its bonus token; negative for requests ahead."""
        return (self.elapsed_s + step_s) / self.tpot_slo_s - self.emitted - 1.0

    def needed_rate(self, step_s: float) -> FloatArray:
        """Return the tokens per step needed from now to the end to meet the TPOT SLO; inf where none suffice."""
        left_s = self.tpot_slo_s * (self.emitted + self.num_left) - self.elapsed_s
        rates = np.full(len(left_s), np.inf)
        np.divide(self.num_left * step_s, left_s, out=rates, where=left_s > 0.0)
        return rates

    def cushion(self, needed_rate: FloatArray, tokens_per_step: float, spread: float) -> FloatArray:
        """Return the tokens to be ahead by, since the tokens that the remaining steps commit vary.

        The cushion is largest far from the end, where being ahead is also cheapest to reach, and smaller for requests
        with looser TPOT SLOs.

        Args:
            needed_rate: of :meth:`needed_rate`.
            tokens_per_step: mean tokens that one step commits.
            spread: standard deviation of the tokens that one step commits.
        """
        deviation = spread * np.sqrt(self.num_left / max(tokens_per_step, 1.0))
        share = np.minimum(needed_rate / max(tokens_per_step, 1.0), 1.0)
        return CUSHION * share * deviation


def urgency(late: FloatArray, cushion: FloatArray, is_unattainable: BoolArray, strength: float) -> FloatArray:
    """Return the weights of requests: 1 if ahead of the TPOT SLO by the cushion, larger the later the request is.

    Equal weights of 1 maximise tokens per second. Weights below 1, which would let requests that are far ahead sit
    out, save little where a step has a large fixed cost, and lose throughput.

    Args:
        late, cushion: [num_requests] tokens.
        is_unattainable: [num_requests] bool, the TPOT SLO cannot be met any more: weighted like a request without one.
        strength: weight of one token of lateness.

    Returns:
        [num_requests] f64, each at least 1.
    """
    return 1.0 + strength * np.where(is_unattainable, 0.0, np.clip(late + cushion, 0.0, MAX_LATE))
