"""AdaServe (arXiv 2501.12162): depth and width by equations 8 and 9, nodes by Algorithm 2, one fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.options import AdaServeOptions
from hf_slospec.policies.adaserve_selection import adaptive_shape, required_tokens, select_nodes
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import affordable_tokens, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings


@dataclass(frozen=True)
class _AdaServeStep:
    """State of one step."""

    begun_s: float


class AdaServePolicy:
    """SLO-customised selection that spends the whole token budget on every step."""

    def __init__(self, config: PolicySettings, costs: StepCosts):
        self.config, self.costs = config, costs
        self.options = config.options_of(AdaServeOptions)
        self.budget = config.token_budget or affordable_tokens(costs)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        depth, width = adaptive_shape(
            len(requests),
            self.budget,
            self.config.draft_budget,
            max_useful_depth(requests, self.config.max_depth),
            self.config.max_width,
            self.options.depth_offset,
        )
        return Plan(depth, width, state=_AdaServeStep(begun_s))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        step: _AdaServeStep = plan.state
        candidates = without_useless_nodes(requests, candidates)
        num_keys = sum(len(request.tokens) for request in requests)
        draft_s = self.costs.draft_s(len(requests), plan.depth, plan.width, num_keys)
        step_s = float(draft_s + self.costs.verify_s(self.budget, len(requests), num_keys))
        nodes = select_nodes(
            candidates,
            [required_tokens(*request.decoded(step.begun_s), step_s, request.tpot_slo_s) for request in requests],
            self.budget,
            max_slo_nodes=int(self.options.max_slo_share * self.budget / len(requests)),
            order=self.options.slo_order,
        )
        return selection_of([tree.subtree(own) for tree, own in zip(candidates, nodes, strict=True)], step_s)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        """Do nothing: the paper uses the draft's probabilities and its step times uncorrected."""
