"""TurboSpec (SmartSpec's successor): batch sizes that leave new requests undrafted, and a form for free drafting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.smartspec import SmartSpecPolicy

# All of the released code.
RESET = 100  # times that new requests came to too large a batch, after which it is tried again
PROPOSED = 8  # tokens in a row where drafting costs nothing
TRIES, PAUSE = 40, 60  # steps in which nothing of them was verified before proposing stops, and for how long it does


class TurboSpecPolicy(SmartSpecPolicy):
    """Listing 1, corrected. A step drafts as SmartSpec's does; the listing's rules are about everything else.

    With a draft model, a step whose best length is 0 marks its batch size: requests that come to a larger batch are
    never drafted for. Every ``RESET`` times that this happened all sizes are tried again. [FIX] the printed condition
    on the method is inverted: it is a draft model that has prompts to read.

    With prompt lookup drafting is free, and proposals differ in length, down to none. So as much as possible is
    proposed, and how much of it is verified is chosen by goodput when it is known who has a proposal.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.off_size = math.inf  # requests of a batch that was best left alone
        self._num_skipped = 0
        self._num_unused = 0  # steps in a row that verified nothing of what was proposed, pauses included

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        if self._drafting_costs():
            plan = super().plan(requests, begun_s, num_prefill_tokens)
            if self._was_plain[-1]:
                self.off_size = len(requests)
            return plan
        self._look_at(requests, num_prefill_tokens)
        if self._num_unused >= TRIES:
            self._num_unused = (self._num_unused + 1) % (TRIES + PAUSE)
            return self._planned(requests, np.zeros(len(requests), dtype=np.int64))
        return self._planned(requests, np.minimum(PROPOSED, self._useful(requests)))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        if self._drafting_costs():
            return super().select(requests, candidates, plan)
        proposed = np.array([tree.max_depth for tree in candidates])
        length = self._best_length(np.minimum(proposed, self._lengths), drafted_s=0.0)
        if plan.depth:
            self._num_unused = 0 if length else self._num_unused + 1
        return self._verified(candidates, np.minimum(length, self._lengths))

    def _is_pointless(self, num_requests: int) -> bool:
        if num_requests <= self.off_size:
            return False
        self._num_skipped += 1
        if self._num_skipped % RESET == 0:
            self.off_size = math.inf
        return True
