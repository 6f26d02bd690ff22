"""Baselines that decide nothing while running: no speculation, a fixed beam, SpecInfer's static tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import useful, useful_depth


class FixedPolicy:
    """Verifies whole beams of the configured depth and width, on every step; a depth of 0 is plain decoding.

    A width of 1 makes chains, as vLLM's and transformers' own speculation does.
    """

    def __init__(self, depth: int, width: int):
        self.depth, self.width = depth, width

    def plan(self, requests: Sequence[Request], begun_s: float, num_fed: int = 0) -> Plan:
        return Plan(useful_depth(requests, self.depth), self.width)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = useful(requests, candidates)
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees])

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        """Nothing is learned."""


EXPANSION = (1, 1, 3, 1, 1, 1, 1)  # children of each node by depth: 18 nodes with the root


class StaticTreePolicy(FixedPolicy):
    """SpecInfer's static tree (arXiv 2305.09781): the best children of every node by a fixed expansion vector."""

    def __init__(self, max_depth: int):
        super().__init__(min(len(EXPANSION), max_depth), max(EXPANSION))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = [expanded(tree) for tree in useful(requests, candidates)]
        return Selection(trees, [float(tree.path_probs.sum()) for tree in trees])


def expanded(tree: TokenTree) -> TokenTree:
    """The part of a candidate tree that the expansion vector asks for, as far as its beam has it."""
    kept = [0]
    for node in kept:
        children = np.flatnonzero(tree.parents == node)
        if tree.depths[node] < len(EXPANSION) and len(children):
            best = children[np.argsort(-tree.path_probs[children], kind="stable")]
            kept.extend(best[: EXPANSION[tree.depths[node]]].tolist())
    return tree.subtree(np.array(kept))
