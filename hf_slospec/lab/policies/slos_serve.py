"""SLOs-Serve (arXiv 2504.08784): chains only as long as each tier of TPOT SLOs needs, so that the
rest of a step is left for prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.lab.policies.goodput import chain_tokens
from hf_slospec.lab.policies.smartspec import Batch, SmartSpecPolicy
from hf_slospec.policies.registry import PolicyOptions, affordable_tokens
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.scheduler.admission import SpecLengths, best_lengths
from hf_slospec.scheduler.guarantees import tiers_of
from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray

# A step is shortened to catch up by at most this share of the time that the TPOT SLO allows for the
# expected tokens of the longest chain
CATCH_UP = 0.5


class SLOsServePolicy(SmartSpecPolicy):
    """Policy that solves the paper's appendix D in every step: one chain length per tier (group of
    similar TPOT SLOs), such that TPOT SLOs are met at the highest prefill rate.

    A TPOT SLO that plain decoding meets needs no drafting, so its tier has length 0. A tier with a
    late request must also make up for the delay. [FIX] the paper tightens the TPOT SLO of such a
    tier without a formula. If the TPOT SLOs cannot be met even without prefill, catching up is
    dropped first, then the tightest tiers get the TPOT SLO of the next one. Requests without a TPOT
    SLO get the longest chains that still fit into the step. If no request has a TPOT SLO, or none
    can be met, chains maximise goodput as in ``smartspec``.
    """

    name = "slos-serve"
    options = PolicyOptions
    chooses_requests = False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.budget = config.token_budget or affordable_tokens(costs)

    def _to_draft(self, batch: Batch) -> IntArray:
        longest = int(batch.useful.max())
        needed = self._slo_lengths(batch, longest + 1)  # nodes, roots included
        wanted = self._best(batch, batch.useful)[0] if needed is None else needed - 1
        lengths: IntArray = np.minimum(wanted, batch.useful)
        num_tokens = int(lengths.sum()) + len(batch.requests) + batch.num_prefill_tokens
        self._predicted_s = float(
            self.costs.shape_s(batch.requests, int(lengths.max()), 1, num_tokens)
        )
        return lengths

    def _slo_lengths(self, batch: Batch, max_len: int) -> IntArray | None:
        """Return the nodes to verify per request, root included, such that the TPOT SLOs are met;
        None if there are none, or if even the loosest one cannot be met.

        Args:
            batch: the requests.
            max_len: maximum nodes of a chain, root included.

        Returns:
            [num_requests] int64.
        """
        requests = batch.requests
        tpot_slos_s = np.array([request.pace_s or np.inf for request in requests])
        if np.isinf(tpot_slos_s).all():
            return None
        num_requests = len(requests)
        tiers = np.array(tiers_of(tpot_slos_s.tolist()))
        tier_of = np.searchsorted(tiers, tpot_slos_s, side="right") - 1
        counts = np.bincount(tier_of, minlength=len(tiers))
        slacks = self._slacks(requests, batch.begun_s, max_len)
        for tried, slack in _attempts(
            tiers, np.array([slacks[tier_of == tier].min() for tier in range(len(tiers))])
        ):
            solution = best_lengths(
                lambda num_tokens: self.costs.verify_s(num_tokens, num_requests, batch.num_keys),
                tried.tolist(),
                counts.tolist(),
                self.acceptance.rate,
                max_len,
                max(self.budget, num_requests * max_len),
                self.costs.level_s(num_requests, 1, batch.num_keys),
                slack.tolist(),
            )
            if solution is not None:
                is_free = np.isinf(tiers)
                free_length = self._free_length(batch, solution, counts, is_free)
                lengths: IntArray = np.where(is_free, free_length, solution.lengths)[tier_of]
                return lengths
        return None

    def _slacks(self, requests: Sequence[Request], begun_s: float, max_len: int) -> FloatArray:
        """Return the slack of every request in seconds: 0 if it is not late, otherwise minus the
        time by which this step must be shorter to catch up.  -> [num_requests] f64
        """
        gain = float(chain_tokens(self.acceptance.rate, max_len - 1))
        slacks = []
        for request in requests:
            elapsed_s, emitted = request.decoded(begun_s)
            pace_s = request.pace_s or 0.0
            slacks.append(np.clip(pace_s * emitted - elapsed_s, -CATCH_UP * gain * pace_s, 0.0))
        return np.array(slacks)

    def _free_length(
        self, batch: Batch, solution: SpecLengths, counts: IntArray, is_free: BoolArray
    ) -> int:
        """Return the nodes per chain, root included, for requests without a TPOT SLO: as many as
        fit into the step without adding draft levels.

        Args:
            batch: the requests.
            solution: lengths of the tiers.
            counts: [tiers] int64, requests per tier.
            is_free: [tiers] bool, the tier has no TPOT SLO.
        """
        num_free = int(counts[is_free].sum())
        longest = int(solution.lengths.max())
        # Nodes for requests with a TPOT SLO
        num_bound = int((solution.lengths * counts)[~is_free].sum())
        num_nodes = num_bound + num_free * np.arange(1, longest + 1)
        seconds = self.costs.shape_s(
            batch.requests, longest - 1, 1, num_nodes + batch.num_prefill_tokens
        )
        fits = seconds <= solution.limit_s
        return 1 + int(np.count_nonzero(fits[1:]))


def _attempts(tiers: FloatArray, slacks: FloatArray) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield the problems to try to solve, each as TPOT SLOs and slacks by tier, from the hardest to
    the easiest; tiers without a TPOT SLO stay as they are.
    """
    yield tiers, slacks
    for tpot_slo_s in tiers[np.isfinite(tiers)]:
        yield np.maximum(tiers, tpot_slo_s), np.zeros(len(tiers))
