"""SmartSpec's confidence-based variant: drafting ends where the draft is unsure (its Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.goodput import confident_length
from hf_slospec.lab.policies.options import ConfidenceOptions
from hf_slospec.lab.policies.smartspec import ChainStep, SmartSpecPolicy
from hf_slospec.policies.settings import PolicySettings


class ConfidencePolicy(SmartSpecPolicy):
    """Policy that drafts until a token is no more probable than a threshold, and verifies as much as goodput says.

    [FIX] The printed loop drafts one token too many, and verifies only chains that never stopped: here the proposed
    tokens of all requests are verified, up to the common length. Drafting itself is never turned off, as printed.
    """

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.min_confidence = config.options_of(ConfidenceOptions).min_confidence

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        step = self._begin(requests, num_prefill_tokens)
        return self._planned(step, requests, self._useful_lengths(requests), self.min_confidence)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        step: ChainStep = plan.state
        # Drafting goes on while any request is above the threshold, so chains are cut here.
        confident = [confident_length(tree, self.min_confidence) for tree in candidates]
        proposed = np.minimum(confident, step.lengths)
        num_drafting, num_levels = len(plan.drafting or ()), max(tree.max_depth for tree in candidates)
        drafted_s = float(self.costs.draft_s(num_drafting, num_levels, 1, step.num_keys))
        return self._selected(step, candidates, np.minimum(proposed, self._best_length(step, proposed, drafted_s)))
