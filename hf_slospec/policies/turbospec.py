"""TurboSpec (SmartSpec's successor): the same goodput, and no drafting at batch sizes where it did not pay lately."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_slospec.algo.latency import StepCosts
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.policies.smartspec import SmartSpecPolicy

RESET = 100  # skipped steps after which larger batches are tried again (released code)


class TurboSpecPolicy(SmartSpecPolicy):
    """Listing 1, corrected: a batch size at which length 0 was best switches drafting off for it and larger ones.

    Every ``RESET`` steps that were skipped so, all sizes are tried again. With prompt lookup, drafting is free, so the
    length found is how much of what was matched is worth verifying.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self._off_size = math.inf  # requests of a batch that was best left alone
        self._num_skipped = 0

    def plan(self, requests: Sequence[Request], begun_s: float, num_fed: int = 0) -> Plan:
        if len(requests) >= self._off_size:
            self._num_skipped += 1
            if self._num_skipped % RESET:
                self._lengths, self._step_s = [0] * len(requests), 0.0
                return Plan(0, 1)
            self._off_size = math.inf
        plan = super().plan(requests, begun_s, num_fed)
        if plan.depth == 0:
            self._off_size = len(requests)
        return plan
