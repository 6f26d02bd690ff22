"""The default: AdaServe's selection, with depth and budget no larger than what pays by measured step times."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.depth import DepthControl
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import AdaServePolicy


class AutoPolicy(AdaServePolicy):
    """AdaServe within its own bounds: the SLO phase is the same, the rest stops where goodput is highest.

    The throughput phase adds nodes only while expected tokens per second rise, and depth is the best one by running
    averages (0 included), where AdaServe spends its budget and its depth on every step.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.depths = DepthControl(config.max_depth)

    def plan(self, requests: Sequence[Request]) -> Plan:
        bound = super().plan(requests)
        return Plan(self.depths.best(len(requests), bound.depth, bound.width, self.costs), bound.width)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, now_s: float
    ) -> list[TokenTree]:
        trees = self._select(requests, candidates, plan, now_s, goodput=True)
        if plan.depth:
            self.depths.observe(trees, plan.depth)
        return trees
