"""Baselines that decide nothing while running: no speculation, a fixed beam, SpecInfer's static tree."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.adaserve import useful, useful_depth
from hf_slospec.policies.papers.tree_shapes import SPECINFER, StaticTree


class FixedPolicy:
    """Verifies whole beams of the configured depth and width, on every step; a depth of 0 is plain decoding.

    A width of 1 makes chains, as vLLM's and transformers' own speculation does.
    """

    def __init__(self, depth: int, width: int):
        self.depth, self.width = depth, width

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        return Plan(useful_depth(requests, self.depth), self.width)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = useful(requests, candidates)
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees])

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        """Nothing is learned."""


class StaticTreePolicy(FixedPolicy):
    """One shape for all requests and steps: SpecInfer's tree, or any other."""

    def __init__(self, max_depth: int, static: StaticTree = SPECINFER):
        super().__init__(min(static.max_depth, max_depth), static.max_width)
        self.static = static

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        forest = Forest.of(useful(requests, candidates))
        trees = forest.subtrees(self.static.within(forest))
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees])
