"""The default: AdaServe's selection, with depth and budget no larger than what pays by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_slospec.algo.calibration import Calibration
from hf_slospec.algo.depth import DepthControl
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import AdaServePolicy, useful

SPAN = 16  # nodes over which the cost of one more node is averaged


class AutoPolicy(AdaServePolicy):
    """AdaServe within its own bounds: the SLO phase is the same, the rest stops where goodput is highest.

    Path probabilities are calibrated by what was accepted. The throughput phase adds nodes only while expected tokens
    per second rise. Drafting stops at the level that cannot pay for itself, and is left out where running averages
    say that none pays, unless a request is behind its target. AdaServe takes the draft's word and spends budget and
    depth on every step.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, calibration: Calibration | None = None):
        super().__init__(config, costs)
        self.calibration = calibration or Calibration()
        self.depths = DepthControl(config.max_depth)

    def plan(self, requests: Sequence[Request], begun_s: float) -> Plan:
        bound = super().plan(requests, begun_s)
        best = self.depths.best(len(requests), bound.depth, bound.width, self.costs)
        # A node or a level is worth its time while it may gain more tokens than that time would yield otherwise.
        num_roots, goodput = len(requests), self.depths.goodput
        node_s = float(self.costs.verify(num_roots + SPAN) - self.costs.verify(num_roots)) / SPAN
        level_s = float(self.costs.draft_level(num_roots * bound.width))
        plan = replace(bound, min_path_prob=node_s * goodput, min_gain=level_s * goodput)
        # A request behind its target needs nodes to choose from, also where they do not pay.
        is_behind = any(needed > 1.0 for needed in self._required(requests, plan, begun_s))
        return plan if best or is_behind else replace(plan, depth=0)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, begun_s: float
    ) -> list[TokenTree]:
        candidates = useful(requests, candidates)
        calibrated = [self.calibration(tree) for tree in candidates]
        nodes = self._nodes(requests, calibrated, plan, begun_s, self._step_time(len(requests), plan))
        if plan.depth:
            self.depths.observe([tree.subtree(own) for tree, own in zip(calibrated, nodes, strict=True)], plan.depth)
        return [tree.subtree(own) for tree, own in zip(candidates, nodes, strict=True)]

    def observe(self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]]) -> None:
        for tree, nodes in zip(trees, accepted, strict=True):
            self.calibration.observe(tree, nodes)
