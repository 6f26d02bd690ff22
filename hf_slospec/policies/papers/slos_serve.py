"""SLOs-Serve (arXiv 2504.08784): chains as long as each tier of targets needs, the rest of a step for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.spec_lengths import SpecLengths, best_lengths
from hf_slospec.algo.tree import BoolArray, FloatArray, IntArray
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.admission import tiers_of
from hf_slospec.policies.papers.adaserve import affordable_tokens
from hf_slospec.policies.papers.goodput import chain_tokens
from hf_slospec.policies.papers.smartspec import SmartSpecPolicy

CATCH_UP = 0.5  # of what the longest chain gains, a step makes up for at most


class SLOsServePolicy(SmartSpecPolicy):
    """Appendix D before every step: one length per tier of targets, so that all hold and most prefill is possible.

    A target that plain decoding meets needs no drafting, so lengths are 0 where there is time. A tier with somebody
    behind must bring the next tokens in time for what it is behind, too. [FIX] the paper tightens the target of such a
    tier without a formula. Targets that cannot be kept even without prompts are first not caught up with, then relaxed
    to the next tier's. Requests without target get what fits into the step beside the others; if nobody has a target,
    or none can be kept, goodput decides.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.budget = config.token_budget or affordable_tokens(costs)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        self._look_at(requests, num_prefill_tokens)
        useful = self._useful(requests)
        found = self._found(requests, begun_s, int(useful.max()) + 1)
        lengths = np.minimum(self._best_length(useful) if found is None else found - 1, useful)
        self._step_s = float(self._seconds(len(requests), int(lengths.max()), int(lengths.sum()) + len(requests)))
        return self._planned(requests, lengths)

    def _found(self, requests: Sequence[Request], begun_s: float, max_len: int) -> IntArray | None:
        """Tokens to verify of each request, its root among them, so that targets hold.  -> [num_requests]"""
        targets = np.array([request.tpot_slo_s or np.inf for request in requests])
        if np.isinf(targets).all():
            return None
        num_requests, tiers = len(requests), np.array(tiers_of(targets.tolist()))
        tier_of = np.searchsorted(tiers, targets, side="right") - 1
        counts = np.bincount(tier_of, minlength=len(tiers))
        slacks = self._slacks(requests, begun_s, max_len)
        for tried, slack in _attempts(tiers, np.array([slacks[tier_of == tier].min() for tier in range(len(tiers))])):
            found = best_lengths(
                lambda num_tokens: self.costs.verify_s(num_tokens, num_requests, self._num_keys),
                tried.tolist(),
                counts.tolist(),
                self.acceptance.rate,
                max_len,
                max(self.budget, num_requests * max_len),
                self.costs.level_s(num_requests, 1, self._num_keys),
                slack.tolist(),
            )
            if found is not None:
                is_free = np.isinf(tiers)
                beside = self._length_beside(found, counts, is_free)
                lengths: IntArray = np.where(is_free, beside, found.lengths)[tier_of]
                return lengths
        return None

    def _slacks(self, requests: Sequence[Request], begun_s: float, max_len: int) -> FloatArray:
        """Seconds by which the next step must be shorter than targets allow, negative; 0 for who is not behind."""
        gain = float(chain_tokens(self.acceptance.rate, max_len - 1))
        slacks = []
        for request in requests:
            elapsed_s, emitted = request.decoded(begun_s)
            tpot_slo_s = request.tpot_slo_s or 0.0
            slacks.append(np.clip(tpot_slo_s * emitted - elapsed_s, -CATCH_UP * gain * tpot_slo_s, 0.0))
        return np.array(slacks)

    def _length_beside(self, found: SpecLengths, counts: IntArray, is_free: BoolArray) -> int:
        """The longest chain of those without target that needs no further level and keeps the step within its limit."""
        num_free, longest = int(counts[is_free].sum()), int(found.lengths.max())
        others = int((found.lengths * counts)[~is_free].sum())
        num_tokens = others + num_free * np.arange(1, longest + 1)
        fits = self._seconds(int(counts.sum()), longest - 1, num_tokens) <= found.limit_s
        return 1 + int(np.count_nonzero(fits[1:]))

    def _seconds(self, num_requests: int, num_levels: int, num_tokens: IntArray | int) -> FloatArray:
        """Of a step with these draft levels and nodes, and with the prefill that goes through the same forward."""
        draft_s = self.costs.draft_s(num_requests, num_levels, 1, self._num_keys)
        return draft_s + self.costs.verify_s(num_tokens + self._num_fed, num_requests, self._num_keys)


def _attempts(tiers: FloatArray, slacks: FloatArray) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Targets and slacks by tier, ever easier to keep; those without target stay apart."""
    yield tiers, slacks
    for tpot_slo_s in tiers[np.isfinite(tiers)]:
        yield np.maximum(tiers, tpot_slo_s), np.zeros(len(tiers))
