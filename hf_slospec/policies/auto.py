"""The default: one ratio of weighted expected tokens to seconds decides depth, width and nodes of every step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np

from hf_slospec.algo.acceptance import Acceptance
from hf_slospec.algo.depth import DepthControl, ShapeTime
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.select import best_ratio_nodes
from hf_slospec.algo.tree import FloatArray, Forest, IntArray, TokenTree
from hf_slospec.algo.urgency import SLOProgress, urgency
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.adaserve import affordable_tokens, useful_depth

logger = logging.getLogger(__name__)

SPAN = 16  # nodes over which the cost of one more node is averaged
UNATTAINABLE = 2.0  # times what whole candidate trees yield on average: a request that needs more cannot be helped
SURE = 8  # steps with drafts before any request is given up
FADE = 0.1  # weight of a step in running figures
LOOKED_AT = 8  # requests that are drafted for to see whether speculation pays again: for all, all prompts would be read
LEFTOVER = 0.5  # weight of a best-effort request


class SpeculationHistory:
    """What runs teach the next: acceptance, and the shapes that paid."""

    def __init__(self, config: SLOSpecConfig):
        self.acceptance = Acceptance(config.max_depth)
        self.depths = DepthControl(config.max_depth, config.max_width)
        self.tokens, self.variance = 1.5, 1.0  # committed per request and step: mean, and variance around expectation
        self.step_s = 0.0  # seconds of a step, by late ones; 0: none yet
        self.most_tokens = 2.0  # expected per request and step, were all its candidates verified


class AutoPolicy:
    """Maximises expected tokens per second, late requests' tokens counting more.

    The budget of a step is what it finds: nodes are added, best first, while the ratio rises. Drafting goes as deep and
    wide as running averages say that it pays, no deeper than this step's trees are worth, and not at all when none
    pays, but for a look now and then. Path probabilities are calibrated by what was accepted, step times corrected by
    what was measured.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, experience: SpeculationHistory | None = None):
        self.config, self.costs = config, costs
        self.learned = experience or SpeculationHistory(config)
        self.budget = config.token_budget or affordable_tokens(costs)
        self._warned: WeakSet[Request] = WeakSet()

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        self._num_fed = num_prefill_tokens
        self._num_keys = sum(len(request.tokens) for request in requests)
        self._urgency = self._urgency_of(requests, begun_s)
        self._weights = self._urgency * np.array([LEFTOVER if request.is_best_effort else 1.0 for request in requests])
        num_requests, depths = len(requests), self.learned.depths
        max_depth = useful_depth(requests, self.config.max_depth)
        max_width = min(max(self.config.draft_budget // num_requests, 1), self.config.max_width)
        depth, width = depths.best(max_depth, max_width, self._shape_time(num_requests, num_requests))
        # The same ones again and again: the draft knows them.
        drafting = requests if depths.is_on else requests[:LOOKED_AT]
        if depth == 0 and (self._urgency > 1.0).any():
            drafting = requests
            depth, width = self._shape_for_the_late(num_requests, max_depth, max_width)
        # A node or a level is worth its time while it may gain more tokens than that time would yield otherwise.
        goodput = depths.goodput * num_requests
        verify_s = self._verify_s(num_requests + np.array([0, SPAN]), num_requests)
        level_s = self.costs.level_s(num_requests, width, self._num_keys)
        self._plan = Plan(
            depth,
            width,
            min_path_prob=float(verify_s[1] - verify_s[0]) / SPAN * goodput,
            min_gain=level_s * goodput * len(drafting) / num_requests,
            drafting=drafting,
        )
        self._num_drafting = len(drafting)
        return self._plan

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        forest, num_requests = Forest.of(candidates), len(requests)
        prediction = self.learned.acceptance.predict(requests, forest)
        draft_s = self.costs.draft_s(self._num_drafting, int(forest.depths.max()), plan.width, self._num_keys)

        def step_s(num_nodes: IntArray) -> FloatArray:
            return draft_s + self._verify_s(num_nodes, num_requests)

        def mixed_s(num_nodes: IntArray) -> FloatArray:
            return step_s(num_nodes + self._num_fed)

        # Nodes deeper than what a request may still emit are never committed.
        is_useful = forest.depths < np.array([request.num_left for request in requests])[forest.tree_of]
        values = self._weights[forest.tree_of] * prediction.path_probs * is_useful
        self._verified = best_ratio_nodes(forest, values, self.budget, step_s, mixed_s if self._num_fed else None)
        self._prediction = prediction
        expected = prediction.expected_tokens(self._verified)
        predicted_s = float(mixed_s(np.array(np.count_nonzero(self._verified))))
        return Selection(forest.subtrees(self._verified), expected.tolist(), predicted_s)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        prediction, verified, learned, plan = self._prediction, self._verified, self.learned, self._plan
        forest, num_requests = prediction.forest, len(requests)
        in_forest = np.flatnonzero(verified)  # accepted nodes are numbered as in the verified trees
        firsts = np.searchsorted(in_forest, forest.starts).tolist()
        own = [first + node for first, nodes in zip(firsts, accepted, strict=True) for node in nodes]
        learned.acceptance.observe(requests, prediction, verified, in_forest[np.array(own, np.int64)])
        learned.step_s += (FADE if learned.step_s else 1.0) * (phases.total_s - learned.step_s)
        rest_s = phases.select_s + phases.verify_s + phases.host_s
        self.costs.observe_verify(rest_s, len(in_forest) + self._num_fed, num_requests, self._num_keys)
        if not plan.depth:
            return
        depth = int(forest.depths.max())
        num_drafting = self._num_drafting
        self.costs.observe_draft(phases.draft_s, num_drafting, depth, plan.width, self._num_keys)
        seen = depth if _was_cut_short(forest, plan) else plan.depth
        learned.depths.observe(forest, prediction.path_probs, verified, seen, plan.width, num_drafting)
        surprise = np.array([1.0 + len(nodes) for nodes in accepted]) - prediction.expected_tokens(verified)
        learned.tokens += FADE * ((1.0 + len(own) / num_requests) - learned.tokens)
        learned.variance += FADE * (float((surprise**2).mean()) - learned.variance)
        most_tokens = 1.0 + (float(prediction.path_probs.sum()) - num_requests) / num_drafting  # roots count 1 each
        learned.most_tokens += FADE * (most_tokens - learned.most_tokens)

    def _urgency_of(self, requests: Sequence[Request], begun_s: float) -> FloatArray:
        """How much more the tokens of late requests count.  -> [num_requests] f64"""
        if all(request.tpot_slo_s is None for request in requests):
            return np.ones(len(requests))
        learned = self.learned
        rows = [(r.tpot_slo_s or np.inf, *r.decoded(begun_s), r.num_left_in_stage) for r in requests]
        standing = SLOProgress(*np.array(rows, np.float64).T)
        needed = standing.needed_rate(learned.step_s)
        is_unattainable = (needed > UNATTAINABLE * learned.most_tokens) & (learned.depths.num_observed > SURE)
        for index in np.flatnonzero(is_unattainable).tolist():
            self._warn_once(requests[index], float(needed[index]))
        cushion = standing.cushion(learned.step_s, learned.tokens, learned.variance**0.5)
        return urgency(standing.late(learned.step_s), cushion, is_unattainable, self.config.urgency)

    def _warn_once(self, request: Request, needed: float) -> None:
        if request not in self._warned:
            self._warned.add(request)
            logger.warning(
                "request %d can no longer meet its target of %.4g s per token and goes on as fast as the leftover "
                "allows: it needs %.1f tokens per step, and whole candidate trees yield %.1f",
                request.index, request.tpot_slo_s, needed, self.learned.most_tokens,
            )  # fmt: skip

    def _shape_time(self, num_requests: int, num_drafting: int) -> ShapeTime:
        """Seconds of a step in which some of the requests get nodes beside their roots."""

        def seconds(depths: IntArray, widths: IntArray, nodes: FloatArray) -> FloatArray:
            draft_s = self.costs.draft_s(num_requests, depths, widths, self._num_keys)
            num_nodes = num_requests - num_drafting + num_drafting * nodes
            return draft_s + self._verify_s(num_nodes, num_requests)

        return seconds

    def _verify_s(self, num_nodes: IntArray | FloatArray, num_requests: int) -> FloatArray:
        """Seconds of a forward of these nodes."""
        return self.costs.verify_s(num_nodes, num_requests, self._num_keys)

    def _shape_for_the_late(self, num_requests: int, max_depth: int, max_width: int) -> tuple[int, int]:
        """Where speculation does not pay for all, it may still be faster for those that get all of its nodes."""
        num_late = int((self._urgency > 1.0).sum())
        depth, width, best, plain = self.learned.depths.best_shape(
            max_depth, max_width, self._shape_time(num_requests, num_late)
        )
        return (depth, width) if best > plain else (0, 1)


def _was_cut_short(forest: Forest, plan: Plan) -> bool:
    """Whether the drafter stopped because deeper levels were not worth it; what they hold is not known then."""
    last = forest.path_probs[forest.depths == forest.depths.max()]
    return bool(np.maximum(last - plan.min_path_prob, 0.0).sum() < plan.min_gain)
