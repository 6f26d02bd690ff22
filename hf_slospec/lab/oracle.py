"""Oracle policies, which know the target's texts and verify only nodes that will be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_slospec.algo.tree import ROOT, IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.protocols import Drafter, Plan, Policy, Selection
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.policies.optimal import OptimalPolicy
from hf_slospec.lab.texts import Library
from hf_slospec.policies.limits import max_useful_depth


class OraclePolicy(Policy):
    """Policy with access to the texts, which tries all widths of every step on a separate clock first.

    It drafts only for requests with tokens that will be accepted, and knows the cost of drafting. The draft's prefill
    of prompts is not counted, since it pays in later steps. It maximises the tokens per second of each single step and
    knows neither SLOs nor arrivals, so it shows the cost of not knowing acceptance. It is not an upper bound (one is in
    benchmarks/papers/bounds.py); the best of several settings comes closer to one.
    """

    def __init__(self, library: Library, config: SLOSpecConfig, hardware: Hardware, trial: Drafter):
        """Create a policy that tries the drafts of ``trial``, whose clock is not that of the simulation."""
        self.library, self.config, self.costs = library, config, hardware.costs()
        self._trial = trial

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        """Return the shape with the most committed tokens per second in trials of this step's drafting."""
        max_depth = max_useful_depth(requests, self.config.max_depth)
        if not max_depth:
            return Plan(0, 1)
        max_width = min(max(self.config.draft_budget // len(requests), 1), self.config.max_width)
        plans = [self._best_depth(requests, max_depth, width) for width in range(1, max_width + 1)]
        return max(plans, key=lambda pair: pair[0])[1]

    def _best_depth(self, requests: Sequence[Request], max_depth: int, width: int) -> tuple[float, Plan]:
        """Return the best plan of one width, and its committed tokens per second."""
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        trees = self._trial.draft(requests, Plan(max_depth, width))
        pairs = zip(requests, trees, strict=True)
        hits = np.array([len(accepted_nodes(self.library, *pair)) - 1 for pair in pairs])
        drafting = [request for request, hit in zip(requests, hits.tolist(), strict=True) if hit]
        if not drafting:
            return num_requests / float(self.costs.verify_s(num_requests, num_requests, num_keys)), Plan(0, 1)
        depths = np.arange(max_depth + 1)
        accepted = np.minimum(hits[:, None], depths).sum(axis=0)
        num_catch_up = sum(min(request.num_draft_behind, max_depth + 1) for request in drafting)
        draft_keys = sum(len(request.tokens) for request in drafting)
        draft_s = self.costs.draft_s(len(drafting), depths, width, draft_keys, num_catch_up)
        rates = (num_requests + accepted) / (
            draft_s + self.costs.verify_s(num_requests + accepted, num_requests, num_keys)
        )
        best = int(np.argmax(rates))
        return float(rates[best]), Plan(best, width, drafting=drafting)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        """Return the candidates that will be accepted."""
        pairs = zip(requests, candidates, strict=True)
        trees = [tree.subtree(accepted_nodes(self.library, request, tree)) for request, tree in pairs]
        return Selection(trees, [float(tree.num_nodes) for tree in trees])


class AdaServeOraclePolicy(OptimalPolicy):
    """AdaServe's policy with true path probabilities: 1 for nodes that will be accepted and 0 for all others.

    With these the paper's Algorithm 1 is optimal: as many tokens as the budget yields, after what every request
    requires. Trees are drafted as by AdaServe.
    """

    is_wide = False

    def __init__(self, library: Library, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config, costs)
        self.library = library

    def _nodes(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], required: Sequence[float]
    ) -> list[IntArray]:
        trees = [self._with_true_probs(*pair) for pair in zip(requests, candidates, strict=True)]
        return super()._nodes(requests, trees, required)

    def _with_true_probs(self, request: Request, tree: TokenTree) -> TokenTree:
        is_accepted = np.zeros(tree.num_nodes)
        is_accepted[accepted_nodes(self.library, request, tree)] = 1.0
        return replace(tree, path_probs=is_accepted)


def accepted_nodes(library: Library, request: Request, tree: TokenTree) -> IntArray:
    """Return the nodes that will be accepted, the root first.  -> [num_accepted + 1] int64"""
    nodes = [ROOT]
    while len(nodes) < request.num_left:
        position = request.num_emitted + len(nodes) - 1
        child = tree.child(nodes[-1], library.token(request.index, position))
        if child is None:
            break
        nodes.append(child)
    return np.array(nodes)
