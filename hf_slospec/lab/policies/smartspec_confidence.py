"""SmartSpec's confidence-based variant: drafting ends at a token of low probability (its Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.goodput import confident_length
from hf_slospec.lab.policies.smartspec import Batch, Chains, SmartSpecPolicy
from hf_slospec.policies.registry import PolicyOptions
from hf_slospec.policies.settings import PolicySettings


class ConfidenceOptions(PolicyOptions):
    """Settings of ``smartspec-confidence``."""

    min_confidence: float = Field(
        0.5, ge=0, lt=1, description="A token with at most this probability is the last one drafted."
    )


class ConfidencePolicy(SmartSpecPolicy):
    """Policy that drafts until a token is no more probable than a threshold, and verifies the length of best goodput.

    [FIX] The printed loop drafts one token too many, and verifies only chains that never stopped: here the proposed
    tokens of all requests are verified, up to the common length. As printed, drafting is never turned off.

    Requests that have stopped leave the draft's batch in the simulator and on a CPU. Other devices draft on for all
    requests until the last one stops, and what they drafted in vain is dropped.
    """

    name, options, chooses_requests = "smartspec-confidence", ConfidenceOptions, False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.min_confidence = config.options_of(ConfidenceOptions).min_confidence

    def _to_draft(self, batch: Batch) -> Chains:
        return Chains(batch.useful)

    def _to_verify(self, batch: Batch, drafted: Chains, candidates: Sequence[TokenTree], plan: Plan) -> Chains:
        # Not all drafters stop for single requests, so chains are cut here.
        confident = [confident_length(tree, self.min_confidence) for tree in candidates]
        proposed = np.minimum(confident, drafted.lengths)
        levels = np.array([[tree.max_depth] for tree in candidates])
        length, step_s = self._best(batch, proposed, float(self._draft_s(batch, levels)[0, 0]))
        return Chains(np.minimum(proposed, length), step_s)
