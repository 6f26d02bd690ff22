"""An oracle policy: verifies exactly the candidates that will be accepted, at the depth with the most tokens/s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import ROOT, IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.limits import max_useful_depth
from hf_slospec.sim.hardware import Hardware
from hf_slospec.sim.models import SimulatedDrafter, VirtualClock
from hf_slospec.sim.texts import Library


class OraclePolicy:
    """Policy with access to the texts; drafts every step on a separate clock first to choose the depth.

    It ignores SLOs: it measures the throughput that unknown acceptance costs, not attainment.
    """

    def __init__(self, library: Library, config: SLOSpecConfig, hardware: Hardware, seed: int):
        self.library, self.config, self.costs = library, config, hardware.costs()
        self._trial = SimulatedDrafter(library, hardware, VirtualClock(), seed)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        """Return the depth with the most committed tokens per second, by a trial of this step's drafting."""
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        width = min(max(self.config.draft_budget // num_requests, 1), self.config.max_width)
        max_depth = max_useful_depth(requests, self.config.max_depth)
        if not max_depth:
            return Plan(0, 1)
        trees = self._trial.draft(requests, Plan(max_depth, width))
        hits = np.array([len(self._true(*pair)) - 1 for pair in zip(requests, trees, strict=True)])
        depths = np.arange(max_depth + 1)
        accepted = np.minimum(hits[:, None], depths).sum(axis=0)
        draft_s = self.costs.draft_s(num_requests, depths, width, num_keys)
        seconds = draft_s + self.costs.verify_s(num_requests + accepted, num_requests, num_keys)
        return Plan(int(np.argmax((num_requests + accepted) / seconds)), width)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        """Return the candidates that will be accepted."""
        trees = [tree.subtree(self._true(request, tree)) for request, tree in zip(requests, candidates, strict=True)]
        return Selection(trees, [float(tree.num_nodes) for tree in trees])

    def _true(self, request: Request, tree: TokenTree) -> IntArray:
        """Return the nodes that will be accepted, the root first.  -> [num_accepted + 1] int64"""
        nodes = [ROOT]
        while len(nodes) < request.num_left:
            place = request.num_emitted + len(nodes) - 1
            child = tree.child(nodes[-1], self.library.token(request.index, place))
            if child is None:
                break
            nodes.append(child)
        return np.array(nodes)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        """Do nothing: the texts are known in advance."""
