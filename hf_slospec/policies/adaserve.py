"""AdaServe (arXiv 2501.12162): depth and width by equations 8 and 9, nodes by Algorithm 2, one fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.select import StepTime, adaptive_shape, required_tokens, select_nodes
from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request

MAX_AFFORDABLE = 1024
AFFORDABLE = 4.0  # with no budget given, a step may cost up to this many times one token's step


class AdaServePolicy:
    """SLO-customised selection that spends the whole token budget on every step."""

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        self.config, self.costs = config, costs
        self.budget = config.token_budget or affordable_tokens(costs)

    def plan(self, requests: Sequence[Request], begun_s: float) -> Plan:
        config = self.config
        useful = max(request.num_left for request in requests) - 1  # a tree of depth d commits up to d + 1 tokens
        max_depth = min(config.max_depth, useful)
        return Plan(
            *adaptive_shape(
                len(requests), self.budget, config.draft_budget, max_depth, config.max_width, config.depth_offset
            )
        )

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan, begun_s: float
    ) -> list[TokenTree]:
        candidates = useful(requests, candidates)
        nodes = self._nodes(requests, candidates, plan, begun_s)
        return [tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)]

    def observe(self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]]) -> None:
        """The paper takes the draft's probabilities as they are."""

    def _nodes(
        self,
        requests: Sequence[Request],
        candidates: Sequence[TokenTree],
        plan: Plan,
        begun_s: float,
        step_time_s: StepTime | None = None,
    ) -> list[IntArray]:
        return select_nodes(
            candidates,
            self._required(requests, plan, begun_s),
            self.budget,
            max_slo_nodes=int(self.config.max_slo_share * self.budget / len(requests)),
            order=self.config.slo_order,
            step_time_s=step_time_s,
        )

    def _required(self, requests: Sequence[Request], plan: Plan, begun_s: float) -> list[float]:
        """A(r) of every request, for a step of this plan that spends the whole budget."""
        full_step_s = float(self._step_time(len(requests), plan)(np.array(self.budget)))
        return [required_tokens(r.elapsed_s(begun_s), r.num_emitted - 1, full_step_s, r.target_s) for r in requests]

    def _step_time(self, num_requests: int, plan: Plan) -> StepTime:
        draft_s = self.costs.draft_s(num_requests, plan.depth, plan.width)

        def step_time_s(num_nodes: IntArray) -> FloatArray:
            return draft_s + self.costs.verify(num_nodes)

        return step_time_s


def useful(requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[TokenTree]:
    """The candidate trees without nodes deeper than what their requests may still emit: those are never committed."""
    return [tree.up_to(request.num_left - 1) for tree, request in zip(candidates, requests, strict=True)]


def affordable_tokens(costs: StepCosts) -> int:
    """The most tokens whose verify step costs at most :data:`AFFORDABLE` times a single token's, by measurement."""
    num_tokens = np.arange(1, MAX_AFFORDABLE + 1)
    times_s = costs.verify(num_tokens)
    return int(np.searchsorted(times_s, AFFORDABLE * times_s[0], side="right"))
