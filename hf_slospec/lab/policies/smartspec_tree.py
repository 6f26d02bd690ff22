"""SmartSpec's top-k form: full trees of heads, their depth and widths by goodput (corrected equation 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hf_slospec.algo.calibration import tried_and_hit
from hf_slospec.algo.tree import Forest, TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.goodput import MovingAcceptance, heads_nodes, heads_shapes, heads_tokens
from hf_slospec.lab.policies.smartspec import BIAS
from hf_slospec.lab.policies.static_tree import trees_within
from hf_slospec.lab.policies.tree_shapes import StaticTree
from hf_slospec.policies.limits import max_useful_depth
from hf_slospec.policies.settings import PolicySettings

MAX_WIDTH = 8  # nodes of a layer; bounds the number of shapes


@dataclass
class _HeadsStep:
    """State of one step."""

    shape: StaticTree
    expected: list[float]  # tokens, by depth of a draft tree
    step_s: float  # predicted
    trees: list[TokenTree] = field(init=False)  # draft trees; set by select


class HeadsPolicy:
    """Policy that drafts the widths k_1, k_2, ... with most expected tokens per second, or no tree.

    A level of the beam stands for a head. As in the paper, the candidates of a head are taken for independent, each
    accepted at the head's rate; the rates are moving averages over the candidates that were tried at that depth.
    """

    def __init__(self, config: PolicySettings, costs: StepCosts):
        self.config, self.costs = config, costs
        self.max_width = min(config.max_width, MAX_WIDTH)
        self.acceptances = [MovingAcceptance() for _ in range(config.max_depth)]

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
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
        depth, own_widths = int(depths[best]), shapes[best].tolist()
        expected = [float(heads_tokens(rates[:end], own_widths[:end])) for end in range(depth + 1)]
        step = _HeadsStep(StaticTree.of_expansion(own_widths[:depth]), expected, float(seconds[best]))
        return Plan(depth, int(widths[best]), state=step)

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        step: _HeadsStep = plan.state
        step.trees = trees_within(step.shape, requests, candidates)
        return Selection(step.trees, [step.expected[tree.max_depth] for tree in step.trees], step.step_s)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        step: _HeadsStep = plan.state
        forest = Forest.of(step.trees)
        was_tried, was_hit = tried_and_hit(forest, forest.indices(accepted))
        num_levels = len(self.acceptances) + 1
        tried, hits = (np.bincount(forest.depths[nodes], minlength=num_levels) for nodes in (was_tried, was_hit))
        for acceptance, own_tried, own_hits in zip(self.acceptances, tried[1:], hits[1:], strict=True):
            acceptance.observe(int(own_tried), int(own_hits))
