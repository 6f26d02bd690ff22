"""SmartSpec's confidence-based variant: drafting ends where the draft is unsure (its Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.goodput import confident_length
from hf_slospec.policies.papers.smartspec import SmartSpecPolicy


class ConfidencePolicy(SmartSpecPolicy):
    """Everybody drafts until a token is no more probable than the threshold; goodput says how much is verified.

    [FIX] The printed loop drafts one token too many, and verifies only those who never stopped: here each verifies
    what it proposed, up to the common length. Drafting itself is never turned off, as printed.
    """

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        self._look_at(requests, num_prefill_tokens)
        return self._planned(requests, self._useful(requests), self.config.min_confidence)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        # The drafter goes on while anybody is sure, so chains are cut here.
        sure = [confident_length(tree, self.config.min_confidence) for tree in candidates]
        proposed = np.minimum(sure, self._lengths)
        num_drafting, num_levels = len(plan.drafting or ()), max(tree.max_depth for tree in candidates)
        drafted_s = float(self.costs.draft_s(num_drafting, num_levels, 1, self._num_keys))
        return self._verified(candidates, np.minimum(proposed, self._best_length(proposed, drafted_s)))
