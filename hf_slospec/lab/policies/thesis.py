"""Delacourt's thesis: trees by growth and pruning (its Algorithm 1), and nodes by importance (its Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan, PolicyStep, Selection
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.growth import StopRule, grown_nodes, important_nodes
from hf_slospec.policies.adaserve_selection import required_tokens
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import max_useful_depth, roofline_tokens, without_useless_nodes
from hf_slospec.policies.registry import NamedPolicy, PolicyOptions
from hf_slospec.policies.settings import PolicySettings

RECENT = 20  # steps whose mean is the predicted latency of the next one, as printed


class ThesisOptions(PolicyOptions):
    """Settings of ``thesis``."""

    max_tree_nodes: int | None = Field(
        None, ge=1, description="Maximum nodes of one request's tree, its root included (S). None: no limit."
    )


class ThesisSLOOptions(PolicyOptions):
    """Settings of ``thesis-slo``."""

    slack: float = Field(0.0, ge=0, description="Seconds per step to be ahead of TPOT SLOs by (epsilon).")


class CappedThesisSLOOptions(ThesisSLOOptions):
    """Settings of ``thesis-slo-capped``."""

    max_slo_share: float = Field(
        1.2, gt=0, description="n_max as a multiple of an even share of the budget: a late request's limit."
    )


class _ThesisPolicy(NamedPolicy):
    """Policy that drafts whole beams and prunes them to one token budget."""

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.budget = config.token_budget or roofline_tokens(costs)

    def _shape(self, requests: Sequence[Request]) -> Plan:
        if self.budget <= len(requests):  # the roots alone fill the budget
            return Plan(0, 1)
        return Plan(max_useful_depth(requests, self.config.max_depth), self.config.max_width)


class ThesisPolicy(_ThesisPolicy):
    """Policy that maximises expected tokens under a budget for all trees (N) and one per tree (S), by Algorithm 1.

    A tree is drafted on while its last level holds one of the best N nodes so far, of which at most S are of one tree:
    no child is better than its parent. Drafters that do not draft level by level draft the whole planned depth.
    """

    name, options = "thesis", ThesisOptions

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.max_tree_nodes = config.options_of(ThesisOptions).max_tree_nodes or self.budget

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        rule = StopRule(len(requests), self.budget, self.max_tree_nodes)
        return replace(self._shape(requests), goes_on=rule.goes_on)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        config, candidates = self.config, without_useless_nodes(requests, candidates)
        nodes = grown_nodes(candidates, self.budget, self.max_tree_nodes, config.max_depth, config.max_width)
        return selection_of([tree.subtree(kept) for tree, kept in zip(candidates, nodes, strict=True)])


class ThesisSLOPolicy(_ThesisPolicy):
    """Policy that selects nodes for TPOT SLOs first, by lateness of the requests (Algorithm 2).

    As one of n requests may get all of the budget N but the others' roots, candidate trees must have S >= N - n + 1
    nodes. So N is at most n + ``max_depth`` * ``max_width``.
    """

    name, options = "thesis-slo", ThesisSLOOptions
    capped = False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.slack_s = config.options_of(ThesisSLOOptions).slack
        self.max_slo_share = config.options_of(CappedThesisSLOOptions).max_slo_share  # only if capped
        self._latencies: deque[float] = deque(maxlen=RECENT)

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        step_s = sum(self._latencies) / max(len(self._latencies), 1)
        candidates, _ = yield self._shape(requests)
        candidates = without_useless_nodes(requests, candidates)
        nodes = important_nodes(
            candidates,
            [required_tokens(*request.decoded(begun_s), step_s, request.pace_s) for request in requests],
            [request.pace_s for request in requests],
            min(self.budget, len(requests) + self.max_nodes(self.config)),
            slack_s=self.slack_s,
            capped=self.capped,
            max_slo_nodes=int(self.max_slo_share * self.budget / len(requests)),
        )
        trees = [tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)]
        _, phases = yield selection_of(trees, step_s)
        self._latencies.append(phases.total_s)


class CappedThesisSLOPolicy(ThesisSLOPolicy):
    """Policy ``thesis-slo`` with AdaServe's limits, so that a late request cannot take the whole budget."""

    name, options = "thesis-slo-capped", CappedThesisSLOOptions
    capped = True
