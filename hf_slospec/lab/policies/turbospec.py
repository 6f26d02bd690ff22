"""TurboSpec (SmartSpec's successor): new requests in large batches are never drafted for; prompt lookup is free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.smartspec import Batch, Chains, SmartSpecPolicy
from hf_slospec.policies.registry import PolicyOptions
from hf_slospec.policies.settings import PolicySettings

# Constants of the released code.
RESET = 100  # new requests in too large batches after which all batch sizes are tried again
PROPOSED = 8  # tokens proposed per request if drafting costs nothing
TRIES, PAUSE = 40, 60  # steps that verify nothing before proposing pauses, and steps of the pause


class TurboSpecPolicy(SmartSpecPolicy):
    """Policy of Listing 1, corrected, with SmartSpec's choice of the length.

    With a draft model, a step whose best length is 0 sets a limit: new requests in a larger batch are never drafted
    for. After ``RESET`` such requests all batch sizes are tried again. [FIX] the printed condition on the method is
    inverted: it is the draft model that has prompts to prefill. [FIX] the limit is also lifted by a step that drafts
    though its batch is as large; as printed, a single request whose drafts fail once sets a limit of 1.

    With prompt lookup, drafting is free and proposals differ in length, down to none. So as many tokens as possible
    are proposed, and goodput decides how many of them are verified.
    """

    name, options, chooses_requests = "turbospec", PolicyOptions, False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.off_size = math.inf  # size of the last batch for which not drafting was best
        self._num_skipped = 0
        self._num_unused = 0  # consecutive steps that verified none of the proposals, pauses included

    def _to_draft(self, batch: Batch) -> Chains:
        if self._is_drafting_costly():
            chains = super()._to_draft(batch)
            if self._was_plain[-1]:
                self.off_size = len(batch.requests)
            elif chains.lengths.any() and len(batch.requests) >= self.off_size:
                self.off_size = math.inf
            return chains
        if self._num_unused >= TRIES:
            self._num_unused = (self._num_unused + 1) % (TRIES + PAUSE)
            return Chains(np.zeros_like(batch.useful))
        return Chains(np.minimum(PROPOSED, batch.useful))

    def _to_verify(self, batch: Batch, drafted: Chains, candidates: Sequence[TokenTree], plan: Plan) -> Chains:
        if self._is_drafting_costly():
            return drafted
        proposed = np.array([tree.max_depth for tree in candidates])
        length, step_s = self._best(batch, np.minimum(proposed, drafted.lengths), drafted_s=0.0)
        if plan.depth:
            self._num_unused = 0 if length else self._num_unused + 1
        return Chains(np.minimum(length, drafted.lengths), step_s)

    def _is_disabled(self, num_requests: int) -> bool:
        if num_requests <= self.off_size:
            return False
        self._num_skipped += 1
        if self._num_skipped % RESET == 0:
            self.off_size = math.inf
        return True
