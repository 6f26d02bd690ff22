"""Oracle policy, which knows the target's texts and verifies only nodes that will be accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import ROOT, IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.protocols import Plan, Policy, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.models import SimulatedDrafter, VirtualClock
from hf_slospec.lab.texts import Library
from hf_slospec.policies.limits import max_useful_depth


class OraclePolicy(Policy):
    """Policy with access to the texts, which tries all widths of every step on a separate clock first.

    It drafts only for requests with tokens that will be accepted, and knows the cost of drafting. The draft's prefill
    of prompts is not counted, since it pays in later steps. It maximises the tokens per second of each single step and
    knows neither SLOs nor arrivals, so it shows the cost of not knowing acceptance. It is not an upper bound (see
    :mod:`hf_slospec.lab.bounds`); the best of several settings comes closer to one.
    """

    def __init__(self, library: Library, config: SLOSpecConfig, hardware: Hardware, seed: int):
        self.library, self.config, self.costs = library, config, hardware.costs()
        self._trial = SimulatedDrafter(library, hardware, VirtualClock(), seed)

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
        hits = np.array([len(self._correct(*pair)) - 1 for pair in zip(requests, trees, strict=True)])
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
        trees = [tree.subtree(self._correct(request, tree)) for request, tree in zip(requests, candidates, strict=True)]
        return Selection(trees, [float(tree.num_nodes) for tree in trees])

    def _correct(self, request: Request, tree: TokenTree) -> IntArray:
        """Return the nodes that will be accepted, the root first.  -> [num_accepted + 1] int64"""
        nodes = [ROOT]
        while len(nodes) < request.num_left:
            position = request.num_emitted + len(nodes) - 1
            child = tree.child(nodes[-1], self.library.token(request.index, position))
            if child is None:
                break
            nodes.append(child)
        return np.array(nodes)
