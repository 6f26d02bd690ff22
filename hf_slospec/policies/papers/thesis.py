"""Delacourt's thesis: trees by growth and pruning, and nodes by importance to targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.select import required_tokens
from hf_slospec.algo.tree import IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.fixed import FixedPolicy
from hf_slospec.policies.papers.adaserve import affordable_tokens, useful
from hf_slospec.policies.papers.growth import grown_nodes, important_nodes

RECENT = 20  # steps whose mean is the next one's predicted latency, as printed


class ThesisPolicy(FixedPolicy):
    """Algorithm 1: most expected tokens under one budget for all trees (N) and one for each (S)."""

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config.max_depth, config.max_width)
        self.config = config
        self.budget = config.token_budget or affordable_tokens(costs)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        self._begun_s = begun_s
        return super().plan(requests, begun_s) if self.budget > len(requests) else Plan(0, 1)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        candidates = useful(requests, candidates)
        trees = [tree.subtree(own) for tree, own in zip(candidates, self._nodes(requests, candidates), strict=True)]
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees], self._step_s)

    @property
    def _step_s(self) -> float:
        """Nothing is expected."""
        return 0.0

    def _nodes(self, requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[IntArray]:
        max_nodes = self.config.max_tree_nodes or self.budget
        return grown_nodes(candidates, self.budget, max_nodes, self.depth, self.width)


class ThesisSLOPolicy(ThesisPolicy):
    """Algorithm 2: targets first, the latest requests before all others, then most expected tokens."""

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, capped: bool = False):
        """``capped`` adds AdaServe's limits, without which a request that cannot meet its target takes all there is."""
        super().__init__(config, costs)
        self.capped = capped
        self._latencies: deque[float] = deque(maxlen=RECENT)

    @property
    def _step_s(self) -> float:
        return sum(self._latencies) / max(len(self._latencies), 1)

    def _nodes(self, requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[IntArray]:
        return important_nodes(
            candidates,
            [required_tokens(*r.decoded(self._begun_s), self._step_s, r.tpot_slo_s) for r in requests],
            [request.tpot_slo_s for request in requests],
            self.budget,
            slack_s=self.config.slack,
            capped=self.capped,
            max_slo_nodes=int(self.config.max_slo_share * self.budget / len(requests)),
        )

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        self._latencies.append(phases.total_s)
