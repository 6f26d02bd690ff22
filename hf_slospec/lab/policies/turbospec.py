"""TurboSpec (SmartSpec's successor): large batches leave new requests undrafted, and a form for free drafting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.smartspec import ChainStep, SmartSpecPolicy
from hf_slospec.policies.settings import PolicySettings

# All constants are those of the released code.
RESET = 100  # arrivals of new requests in too large a batch, after which all batch sizes are tried again
PROPOSED = 8  # tokens proposed per request where drafting costs nothing
TRIES, PAUSE = 40, 60  # steps that verify nothing before proposing pauses, and steps of the pause


class TurboSpecPolicy(SmartSpecPolicy):
    """Listing 1, corrected. Steps draft as SmartSpec's do; the listing's rules concern everything else.

    With a draft model, a step whose best length is 0 marks its batch size: new requests in a larger batch are never
    drafted for. Every ``RESET`` such arrivals all sizes are tried again. [FIX] the printed condition on the method is
    inverted: the draft model is the one with prompts to prefill.

    With prompt lookup, drafting is free and proposals differ in length, down to none. So as many tokens as possible
    are proposed, and goodput decides how many of them are verified once the proposals are known.
    """

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.off_size = math.inf  # requests of the last batch for which not drafting was best
        self._num_skipped = 0
        self._num_unused = 0  # consecutive steps that verified none of the proposals, pauses included

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        if self._is_drafting_costly():
            plan = super().plan(requests, begun_s, num_prefill_tokens)
            if self._was_plain[-1]:
                self.off_size = len(requests)
            return plan
        step = self._begin(requests, num_prefill_tokens)
        if self._num_unused >= TRIES:
            self._num_unused = (self._num_unused + 1) % (TRIES + PAUSE)
            return self._planned(step, requests, np.zeros(len(requests), dtype=np.int64))
        return self._planned(step, requests, np.minimum(PROPOSED, self._useful_lengths(requests)))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        if self._is_drafting_costly():
            return super().select(requests, candidates, plan)
        step: ChainStep = plan.state
        proposed = np.array([tree.max_depth for tree in candidates])
        length = self._best_length(step, np.minimum(proposed, step.lengths), drafted_s=0.0)
        if plan.depth:
            self._num_unused = 0 if length else self._num_unused + 1
        return self._selected(step, candidates, np.minimum(length, step.lengths))

    def _is_disabled(self, num_requests: int) -> bool:
        if num_requests <= self.off_size:
            return False
        self._num_skipped += 1
        if self._num_skipped % RESET == 0:
            self.off_size = math.inf
        return True
