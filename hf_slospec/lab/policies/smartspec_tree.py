"""SmartSpec's top-k form: full trees of heads, their depth and widths by goodput (corrected equation 10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.calibration import tried_and_hit
from hf_slospec.algo.tree import Forest
from hf_slospec.engine.protocols import Plan, PolicyStep, Selection
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.goodput import MovingAcceptance, heads_nodes, heads_shapes, heads_tokens
from hf_slospec.lab.policies.smartspec import BIAS
from hf_slospec.lab.policies.static_tree import trees_within
from hf_slospec.lab.policies.tree_shapes import StaticTree
from hf_slospec.policies.limits import max_useful_depth
from hf_slospec.policies.registry import NamedPolicy
from hf_slospec.policies.settings import PolicySettings

MAX_WIDTH = 8  # nodes of a layer; bounds the number of shapes


class HeadsPolicy(NamedPolicy):
    """Policy that drafts the widths k_1, k_2, ... with most expected tokens per second, or no tree.

    A level of the beam stands for a head. As in the paper, the candidates of a head are assumed to be independent, each
    accepted at the head's rate; the rates are moving averages over the candidates that were tried at that depth.
    """

    name = "smartspec-tree"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.max_width = min(config.max_width, MAX_WIDTH)
        self.acceptances = [MovingAcceptance() for _ in range(config.max_depth)]

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        shapes = heads_shapes(max_useful_depth(requests, self.config.max_depth), self.max_width)
        rates = [acceptance.rate for acceptance in self.acceptances[: shapes.shape[1]]]
        depths, widths = (shapes > 0).sum(axis=1), np.cumprod(np.maximum(shapes, 1), axis=1).max(axis=1, initial=1)
        seconds = self.costs.draft_s(num_requests, depths, widths, num_keys) + self.costs.verify_s(
            num_requests * heads_nodes(shapes) + num_prefill_tokens, num_requests, num_keys
        )
        goodput = heads_tokens(rates, shapes) / seconds
        goodput[0] *= BIAS  # no tree
        best = int(np.argmax(goodput))
        depth, best_widths = int(depths[best]), shapes[best].tolist()
        expected = [float(heads_tokens(rates[:end], best_widths[:end])) for end in range(depth + 1)]  # by tree depth
        shape, step_s = StaticTree.of_expansion(best_widths[:depth]), float(seconds[best])
        candidates, _ = yield Plan(depth, int(widths[best]))
        trees = trees_within(shape, requests, candidates)
        accepted, _ = yield Selection(trees, [expected[tree.max_depth] for tree in trees], step_s)
        forest = Forest.of(trees)
        was_tried, was_hit = tried_and_hit(forest, forest.indices(accepted))
        num_levels = len(self.acceptances) + 1
        tried, hits = (np.bincount(forest.depths[nodes], minlength=num_levels) for nodes in (was_tried, was_hit))
        for acceptance, num_tried, num_hits in zip(self.acceptances, tried[1:], hits[1:], strict=True):
            acceptance.observe(int(num_tried), int(num_hits))
