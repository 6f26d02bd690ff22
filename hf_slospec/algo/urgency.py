"""How much a request's tokens count, by how late it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray

MAX_LATE = 2.0  # tokens of lateness beyond which a request counts no more
CUSHION = 2.0  # standard deviations of what a request's remaining steps will commit


@dataclass(frozen=True)
class SLOProgress:
    """Where requests stand against their targets, [num_requests] f64 each; inf as target: none.

    Seconds and tokens count from the beginning of the stage a target holds for, at the earliest from the first token.
    """

    tpot_slo_s: FloatArray
    elapsed_s: FloatArray
    emitted: FloatArray
    num_left: FloatArray  # tokens

    def late(self, step_s: float) -> FloatArray:
        """Tokens needed of a step of this length beyond the one that comes anyway; negative when ahead."""
        return (self.elapsed_s + step_s) / self.tpot_slo_s - self.emitted - 1.0

    def needed_rate(self, step_s: float) -> FloatArray:
        """Tokens per step needed from now to the end to meet the target; inf where it is too late for any."""
        left_s = self.tpot_slo_s * (self.emitted + self.num_left) - self.elapsed_s
        rates = np.full(len(left_s), np.inf)
        np.divide(self.num_left * step_s, left_s, out=rates, where=left_s > 0.0)
        return rates

    def cushion(self, step_s: float, tokens_per_step: float, spread: float) -> FloatArray:
        """Tokens to be ahead by, because steps differ in luck: what the remaining steps may deviate.

        ``spread`` is the standard deviation of the ``tokens_per_step`` that one step commits. It matters most far from
        the end, where being ahead is also cheapest to come by, and the less the slower a request may be.
        """
        deviation = spread * np.sqrt(self.num_left / max(tokens_per_step, 1.0))
        share = np.minimum(self.needed_rate(step_s) / max(tokens_per_step, 1.0), 1.0)
        return CUSHION * share * deviation


def urgency(late: FloatArray, cushion: FloatArray, is_unattainable: BoolArray, strength: float) -> FloatArray:
    """Weights of requests: 1 for those ahead of their targets by their cushion, more the later they are.

    A weight of 1 for everyone maximises tokens per second. Weights below 1, which would let requests that are far
    ahead sit out, save little where a step has a large fixed cost, and lose throughput.

    Args:
        late, cushion: [num_requests] tokens.
        is_unattainable: [num_requests], its target cannot be met any more: it counts like one without.
        strength: weight of one token of lateness.

    Returns:
        [num_requests] f64, each at least 1.
    """
    return 1.0 + strength * np.where(is_unattainable, 0.0, np.clip(late + cushion, 0.0, MAX_LATE))
