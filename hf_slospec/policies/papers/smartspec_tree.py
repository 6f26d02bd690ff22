"""SmartSpec's top-k form: full trees of heads, their depth and widths by goodput (corrected equation 10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.calibration import tried_and_hit
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.adaserve import useful, useful_depth
from hf_slospec.policies.papers.goodput import MovingAcceptance, heads_nodes, heads_shapes, heads_tokens
from hf_slospec.policies.papers.smartspec import BIAS
from hf_slospec.policies.papers.tree_shapes import StaticTree

MAX_WIDTH = 8  # nodes of a layer; bounds the number of shapes


class HeadsPolicy:
    """The widths k_1, k_2, ... of all trees together whose expected tokens per second are highest, none included.

    A level of the beam stands for a head. Its candidates are taken for independent, each accepted at the head's rate,
    as the paper does; the rates are moving averages of the candidates that were tried at that depth.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        self.config, self.costs = config, costs
        self.max_width = min(config.max_width, MAX_WIDTH)
        self.acceptances = [MovingAcceptance() for _ in range(config.max_depth)]

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        shapes = heads_shapes(useful_depth(requests, self.config.max_depth), self.max_width)
        rates = [acceptance.rate for acceptance in self.acceptances[: shapes.shape[1]]]
        depths, widths = (shapes > 0).sum(axis=1), np.cumprod(np.maximum(shapes, 1), axis=1).max(axis=1, initial=1)
        seconds = self.costs.draft_s(num_requests, depths, widths, num_keys) + self.costs.verify_s(
            num_requests * heads_nodes(shapes) + num_prefill_tokens, num_requests, num_keys
        )
        goodput = heads_tokens(rates, shapes) / seconds
        goodput[0] *= BIAS  # no tree
        best = int(np.argmax(goodput))
        depth, own_widths = int(depths[best]), shapes[best].tolist()
        self._static = StaticTree.of_expansion(own_widths[:depth])
        self._expected = [float(heads_tokens(rates[:end], own_widths[:end])) for end in range(depth + 1)]
        self._step_s = float(seconds[best])
        return Plan(depth, int(widths[best]))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        forest = Forest.of(useful(requests, candidates))
        self._trees = forest.subtrees(self._static.within(forest))
        return Selection(self._trees, [self._expected[tree.max_depth] for tree in self._trees], self._step_s)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        forest = Forest.of(self._trees)
        was_tried, was_hit = tried_and_hit(forest, forest.indices(accepted))
        num_levels = len(self.acceptances) + 1
        tried, hits = (np.bincount(forest.depths[nodes], minlength=num_levels) for nodes in (was_tried, was_hit))
        for acceptance, own_tried, own_hits in zip(self.acceptances, tried[1:], hits[1:], strict=True):
            acceptance.observe(int(own_tried), int(own_hits))
