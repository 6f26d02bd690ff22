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

    The throughput phase adds nodes only while expected tokens per second rise; depth is the best one by running
    averages (0 included) unless a request is behind its target. AdaServe spends budget and depth on every step.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.depths = DepthControl(config.max_depth)

    def plan(self, requests: Sequence[Request], begun_s: float) -> Plan:
        bound = super().plan(requests, begun_s)
        plan = Plan(self.depths.best(len(requests), bound.depth, bound.width, self.costs), bound.width)
        # A request behind its target needs nodes to choose from, also where they do not pay.
        is_behind = any(needed > 1.0 for needed in self._required(requests, plan, begun_s))
        return bound if is_behind else plan

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, begun_s: float
    ) -> list[TokenTree]:
        trees = self._select(requests, candidates, plan, begun_s, goodput=True)
        if plan.depth:
            self.depths.observe(trees, plan.depth)
        return trees
