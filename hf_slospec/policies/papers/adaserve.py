"""AdaServe (arXiv 2501.12162): depth and width by equations 8 and 9, nodes by Algorithm 2, one fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.select import adaptive_shape, required_tokens, select_nodes
from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request

MAX_AFFORDABLE = 1024
AFFORDABLE = 4.0  # with no budget given, a step may cost up to this many times one token's step


class AdaServePolicy:
    """SLO-customised selection that spends the whole token budget on every step."""

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        self.config, self.costs = config, costs
        self.budget = config.token_budget or affordable_tokens(costs)
        self._begun_s = 0.0

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        config, self._begun_s = self.config, begun_s
        return Plan(
            *adaptive_shape(
                len(requests),
                self.budget,
                config.draft_budget,
                useful_depth(requests, config.max_depth),
                config.max_width,
                config.depth_offset,
            )
        )

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        candidates = useful(requests, candidates)
        num_keys = sum(len(request.tokens) for request in requests)
        draft_s = self.costs.draft_s(len(requests), plan.depth, plan.width, num_keys)
        step_s = float(draft_s + self.costs.verify_s(self.budget, len(requests), num_keys))
        nodes = select_nodes(
            candidates,
            [required_tokens(*request.decoded(self._begun_s), step_s, request.tpot_slo_s) for request in requests],
            self.budget,
            max_slo_nodes=int(self.config.max_slo_share * self.budget / len(requests)),
            order=self.config.slo_order,
        )
        trees = [tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)]
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees], step_s)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        """The paper takes the draft's probabilities and its step times as they are."""


def useful_depth(requests: Sequence[Request], max_depth: int) -> int:
    """The deepest tree that could be committed whole: one of depth d commits up to d + 1 tokens."""
    return min(max_depth, max(request.num_left for request in requests) - 1)


def useful(requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[TokenTree]:
    """The candidate trees without nodes deeper than what their requests may still emit: those are never committed."""
    return [tree.up_to(request.num_left - 1) for tree, request in zip(candidates, requests, strict=True)]


def affordable_tokens(costs: StepCosts) -> int:
    """The most tokens whose verify step costs at most :data:`AFFORDABLE` times a single token's, by measurement."""
    num_tokens = np.arange(1, MAX_AFFORDABLE + 1)
    times_s = np.maximum.accumulate(costs.verify_s(num_tokens))  # corrections differ by size
    return int(np.searchsorted(times_s, AFFORDABLE * times_s[0], side="right"))
