"""SpecInfer (arXiv 2305.09781): one static tree for all requests and steps."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.tree_shapes import SPECINFER, StaticTree
from hf_slospec.policies.fixed import FixedPolicy, selection_of
from hf_slospec.policies.limits import without_useless_nodes


class StaticTreePolicy(FixedPolicy):
    """Policy that verifies one shape on every step: SpecInfer's tree, or any other."""

    def __init__(self, max_depth: int, shape: StaticTree = SPECINFER):
        super().__init__(min(shape.max_depth, max_depth), shape.max_width)
        self.shape = shape

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        return selection_of(trees_within(self.shape, requests, candidates))


def trees_within(shape: StaticTree, requests: Sequence[Request], candidates: Sequence[TokenTree]) -> list[TokenTree]:
    """Return the candidates' nodes that have a place in the shape and can still be committed."""
    forest = Forest.of(without_useless_nodes(requests, candidates))
    return forest.subtrees(shape.within(forest))
