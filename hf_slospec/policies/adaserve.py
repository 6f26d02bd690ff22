"""AdaServe (arXiv 2501.12162): depth and width by equations 8 and 9, nodes by Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.select import adaptive_shape, required_tokens, select_nodes
from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request

AFFORDABLE = 4.0  # with no budget given, steps may cost up to this many times one token's step


class AdaServePolicy:
    """SLO-customised selection under one token budget.

    With ``config.token_budget`` set, each step spends it whole, as the paper does. Without, the budget is a bound
    from measured step times and the throughput phase stops where expected tokens per second is highest.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        self.config, self.costs = config, costs
        self.budget = config.token_budget or affordable_tokens(costs)

    def plan(self, requests: Sequence[Request]) -> Plan:
        config = self.config
        useful = max(request.num_left for request in requests) - 1  # a tree of depth d commits up to d + 1 tokens
        depth, width = adaptive_shape(
            len(requests),
            self.budget,
            config.draft_budget,
            min(config.max_depth, useful),
            config.max_width,
            config.depth_offset,
        )
        return Plan(depth, width)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, now_s: float
    ) -> list[TokenTree]:
        # A node deeper than the tokens a request may still emit can never be committed.
        candidates = [tree.up_to(request.num_left - 1) for tree, request in zip(candidates, requests, strict=True)]
        draft_s = self.costs.draft_s(len(requests), plan.depth, plan.width)

        def step_time_s(num_nodes: IntArray) -> FloatArray:
            return draft_s + self.costs.verify(num_nodes)

        full_step_s = float(step_time_s(np.array(self.budget)))
        nodes = select_nodes(
            candidates,
            [required_tokens(r.elapsed_s(now_s), r.num_emitted - 1, full_step_s, r.target_s) for r in requests],
            self.budget,
            max_slo_nodes=int(self.config.max_slo_share * self.budget / len(requests)),
            order=self.config.slo_order,
            step_time_s=step_time_s if self.config.token_budget is None else None,
        )
        return [tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)]


def affordable_tokens(costs: StepCosts) -> int:
    """The most tokens whose verify step is measured to cost at most :data:`AFFORDABLE` times a single token's."""
    limit_s = AFFORDABLE * float(costs.verify(1))
    return max(n for n in costs.verify.num_tokens if float(costs.verify(n)) <= limit_s)
