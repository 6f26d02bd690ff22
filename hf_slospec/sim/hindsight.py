"""An oracle: verifies exactly the candidates that will be accepted, and drafts as deep as that pays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import ROOT, IntArray, TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import useful_depth
from hf_slospec.sim.texts import Library


class HindsightPolicy:
    """Knows what targets will write. No policy that shares its drafter can commit more per second in a step.

    It looks at no targets: what it shows is how much of a speed-up is lost to not knowing, not how promises are kept.
    """

    def __init__(self, library: Library, config: SLOSpecConfig, costs: StepCosts):
        self.library, self.config, self.costs = library, config, costs

    def plan(self, requests: Sequence[Request], begun_s: float, num_fed: int = 0) -> Plan:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        width = min(max(self.config.draft_budget // num_requests, 1), self.config.max_width)
        depths = np.arange(useful_depth(requests, self.config.max_depth) + 1)
        accepted = np.minimum(self._runs(requests, len(depths) - 1, width)[:, None], depths).sum(axis=0)
        draft_s = self.costs.draft_s(num_requests, depths, width, num_keys)
        seconds = draft_s + self.costs.verify_s(num_requests + accepted, num_requests, num_keys)
        return Plan(int(np.argmax((num_requests + accepted) / seconds)), width)

    def _runs(self, requests: Sequence[Request], most: int, width: int) -> IntArray:
        """How many tokens in a row a beam may hold, ``most`` at most.  -> [num_requests]"""
        indices = np.repeat([request.index for request in requests], most)
        places = np.concatenate([request.num_emitted + np.arange(most) for request in requests])
        is_held = self.library.ranks[self.library.places(indices, places)] < min(width, self.library.num_children)
        runs = np.cumprod(is_held.reshape(len(requests), most), axis=1).sum(axis=1)
        return np.minimum(runs, [request.num_left - 1 for request in requests])

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = [tree.subtree(self._true(request, tree)) for request, tree in zip(requests, candidates, strict=True)]
        return Selection(trees, [float(tree.num_nodes) for tree in trees])

    def _true(self, request: Request, tree: TokenTree) -> IntArray:
        nodes = [ROOT]
        while len(nodes) < request.num_left:
            place = request.num_emitted + len(nodes) - 1
            child = tree.child(nodes[-1], self.library.token(request.index, place))
            if child is None:
                break
            nodes.append(child)
        return np.array(nodes)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        """It knew."""
