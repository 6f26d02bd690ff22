"""Baseline without decisions: plain decoding, or the same beam on every step."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.limits import max_useful_depth, without_useless_nodes


class FixedPolicy:
    """Policy that verifies whole beams of one depth and width on every step; depth 0 is plain decoding.

    A width of 1 makes chains, as vLLM's and transformers' own speculation does.
    """

    def __init__(self, depth: int, width: int):
        self.depth, self.width = depth, width

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        return Plan(max_useful_depth(requests, self.depth), self.width)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        return selection_of(without_useless_nodes(requests, candidates))

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        """Do nothing: the policy learns nothing."""


def selection_of(trees: Sequence[TokenTree], step_s: float = 0.0) -> Selection:
    """Return the selection of these trees, whose expected tokens are the sums of the draft's path probabilities."""
    return Selection(trees, [float(tree.path_probs.sum()) for tree in trees], step_s)
