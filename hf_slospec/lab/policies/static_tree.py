"""SpecInfer (arXiv 2305.09781): one static tree for all requests and steps."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.tree_shapes import SPECINFER, StaticTree
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.limits import max_useful_depth, without_useless_nodes
from hf_slospec.policies.registry import NamedPolicy
from hf_slospec.policies.settings import PolicySettings


class StaticTreePolicy(NamedPolicy):
    """Policy that verifies SpecInfer's tree of 18 nodes on every step."""

    name = "static"
    shape, width = SPECINFER, SPECINFER.max_width

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        return cls.shape.max_depth * cls.width

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        max_depth = min(self.shape.max_depth, self.config.max_depth)
        return Plan(max_useful_depth(requests, max_depth), self.width)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        return selection_of(trees_within(self.shape, requests, candidates))


def trees_within(shape: StaticTree, requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[TokenTree]:
    """Return the subtrees of the candidates that lie in the shape and can still be committed."""
    forest = Forest.of(without_useless_nodes(requests, candidates))
    return forest.subtrees(shape.within(forest))
