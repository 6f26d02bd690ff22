"""Delacourt's thesis: trees by growth and pruning (its Algorithm 1), and nodes by importance (its Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hf_slospec.algo.tree import IntArray, TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.growth import grown_nodes, important_nodes
from hf_slospec.lab.policies.options import CappedThesisSLOOptions, ThesisOptions, ThesisSLOOptions
from hf_slospec.policies.adaserve_selection import required_tokens
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import affordable_tokens, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings

RECENT = 20  # steps whose mean is the predicted latency of the next one, as printed


@dataclass(frozen=True)
class _ThesisStep:
    """State of one step."""

    begun_s: float
    step_s: float  # predicted; 0: no prediction


class ThesisPolicy:
    """Algorithm 1: most expected tokens under one budget for all trees (N) and one for each (S)."""

    def __init__(self, config: PolicySettings, costs: StepCosts):
        self.config = config
        self.budget = config.token_budget or affordable_tokens(costs)
        self.max_tree_nodes = config.options_of(ThesisOptions).max_tree_nodes or self.budget

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        is_full = self.budget <= len(requests)  # with the roots alone
        depth = 0 if is_full else max_useful_depth(requests, self.config.max_depth)
        return Plan(depth, 1 if is_full else self.config.max_width, state=_ThesisStep(begun_s, self._predicted_s()))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        step: _ThesisStep = plan.state
        candidates = without_useless_nodes(requests, candidates)
        nodes = self._nodes(requests, candidates, step)
        return selection_of([tree.subtree(own) for tree, own in zip(candidates, nodes, strict=True)], step.step_s)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        """Do nothing: the policy learns nothing."""

    def _predicted_s(self) -> float:
        return 0.0

    def _nodes(self, requests: Sequence[Request], candidates: Sequence[TokenTree], step: _ThesisStep) -> list[IntArray]:
        config = self.config
        return grown_nodes(candidates, self.budget, self.max_tree_nodes, config.max_depth, config.max_width)


class ThesisSLOPolicy(ThesisPolicy):
    """Algorithm 2: nodes for TPOT SLOs first, the latest requests before all others, then most expected tokens."""

    def __init__(self, config: PolicySettings, costs: StepCosts, capped: bool = False):
        """Create the policy.

        ``capped`` adds AdaServe's limits, without which a request that cannot meet its TPOT SLO takes the whole budget.
        """
        super().__init__(config, costs)
        self.capped = capped
        self.slack_s = config.options_of(ThesisSLOOptions).slack
        self.max_slo_share = config.options_of(CappedThesisSLOOptions).max_slo_share  # only if capped
        self._latencies: deque[float] = deque(maxlen=RECENT)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        self._latencies.append(phases.total_s)

    def _predicted_s(self) -> float:
        return sum(self._latencies) / max(len(self._latencies), 1)

    def _nodes(self, requests: Sequence[Request], candidates: Sequence[TokenTree], step: _ThesisStep) -> list[IntArray]:
        return important_nodes(
            candidates,
            [required_tokens(*r.decoded(step.begun_s), step.step_s, r.tpot_slo_s) for r in requests],
            [request.tpot_slo_s for request in requests],
            self.budget,
            slack_s=self.slack_s,
            capped=self.capped,
            max_slo_nodes=int(self.max_slo_share * self.budget / len(requests)),
        )
