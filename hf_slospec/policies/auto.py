"""Default policy ``auto``, which chooses the nodes of every step to maximise weighted expected
tokens per second; ``depth.py`` chooses depth and width, ``urgency.py`` the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from weakref import WeakSet, ref

import numpy as np

from hf_slospec.engine.acceptance import Acceptance, Prediction
from hf_slospec.engine.costs import StepCosts, level_share
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.engine.latency_curves import Count, Seconds
from hf_slospec.policies.depth import DepthControl, Drafted, ShapeTime
from hf_slospec.policies.registry import NamedPolicy, affordable_tokens, max_useful_depth
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.policies.urgency import SLOProgress, row_weights, urgency
from hf_slospec.request.request import Request
from hf_slospec.tree.select import StepTime, worthwhile_nodes
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree

logger = logging.getLogger(__name__)

SPAN = 16  # number of additional nodes over which the cost of one more node is averaged
# An SLO counts as unattainable if it needs this many times the tokens per step that whole candidate
# trees are expected to commit
UNATTAINABLE = 2.0
MIN_DRAFTED_STEPS = 8  # steps with drafts before any SLO counts as unattainable
FADE = 0.1  # weight of the latest step in running averages
# Bound of the ratio of a step's calibrated path probabilities to the drafter's, and of its inverse
MAX_UNDERSTATED = 4.0
# Needed tokens per step above which the warning says that the time of the SLO has passed
MAX_NEEDED = 1000.0
# Steps within which speculation must recover the time that the drafter spends on prefill first
SETTLED_STEPS = 32
# Requests that a look drafts for while speculation is off; with all requests, the drafter would
# have to prefill all prompts
PROBED_REQUESTS = 8
BEST_EFFORT_WEIGHT = 0.5  # factor on the weight of best-effort requests when nodes are selected
# Outcomes are learned from once this many steps or trees are recorded, whichever comes first: numpy
# takes as long for one tree as for 16
BATCH_STEPS = 4
BATCH_TREES = 16


class SpeculationHistory:
    """Statistics of speculation that are kept between runs: acceptance rates, and the averages by
    which depth and width are chosen.

    Outcomes of steps are recorded one by one, and learned from a few at a time.
    """

    def __init__(self, config: PolicySettings):
        self._acceptance = Acceptance()
        self.depths = DepthControl(config.max_depth, config.max_width)
        self.variance = 1.0  # mean squared error of the predicted tokens per request and step
        # expected tokens per request and step if all its candidates were verified
        self.max_tokens = 2.0
        # ratio of the candidates' calibrated path probabilities to the drafter's
        self.understated = 1.0
        self._outcomes = list[_Outcome]()

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance statistics, all recorded steps included."""
        self._learn()
        return self._acceptance

    def predict(self, requests: Sequence[Request], forest: Forest) -> Prediction:
        """Return the predicted acceptance of the nodes of candidate trees."""
        return self._acceptance.predict(requests, forest)

    def observe(self, outcome: _Outcome) -> None:
        """Record the outcome of a step that drafted."""
        self._outcomes.append(outcome)
        num_trees = sum(outcome.drafted.num_trees for outcome in self._outcomes)
        is_warm = self.depths.num_trees >= self.depths.WARMUP_TREES and not self.depths.is_look
        if not is_warm or len(self._outcomes) >= BATCH_STEPS or num_trees >= BATCH_TREES:
            self._learn()

    def _learn(self) -> None:
        """Update all statistics by the outcomes recorded since the last call."""
        if not self._outcomes:
            return
        outcomes = self._outcomes
        self._outcomes = []
        prediction = Prediction.joined([outcome.prediction for outcome in outcomes])
        is_verified = np.concatenate([outcome.is_verified for outcome in outcomes])
        # ``accepted`` holds indices of nodes in the verified trees; make them indices into
        # ``verified``.
        verified = np.flatnonzero(is_verified)
        accepted = [nodes for outcome in outcomes for nodes in outcome.accepted]
        starts = np.searchsorted(verified, prediction.forest.starts).tolist()
        indices = [
            start + node for start, nodes in zip(starts, accepted, strict=True) for node in nodes
        ]
        requests = [request() for outcome in outcomes for request in outcome.requests]
        drafted = [outcome.drafted for outcome in outcomes]
        forest = prediction.forest
        self._acceptance.observe(
            requests, prediction, is_verified, verified[np.array(indices, np.int64)]
        )
        weights = np.concatenate([outcome.weights for outcome in outcomes])
        self.depths.observe(
            forest, weights[forest.tree_of] * prediction.path_probs, is_verified, drafted
        )
        # Sums of the path probabilities of all candidates, roots left out.
        mass, draft_mass = (
            float(probs.sum()) - len(accepted)
            for probs in (prediction.path_probs, forest.path_probs)
        )
        weight = 1.0 - (1.0 - FADE) ** len(outcomes)
        if draft_mass > 0.0:
            ratio = min(max(mass / draft_mass, 1.0 / MAX_UNDERSTATED), MAX_UNDERSTATED)
            self.understated += weight * (ratio - self.understated)
        error = np.array([1.0 + len(nodes) for nodes in accepted]) - prediction.expected_tokens(
            is_verified
        )
        self.variance += weight * (float((error**2).mean()) - self.variance)
        max_tokens = 1.0 + mass / sum(step.num_trees for step in drafted)
        self.max_tokens += weight * (max_tokens - self.max_tokens)


@dataclass
class _Outcome:
    """Outcome of a step that drafted."""

    requests: Sequence[ref[Request]]
    prediction: Prediction
    is_verified: BoolArray  # [num_nodes]
    drafted: Drafted
    # [num_trees] f64: weights of :func:`row_weights`, with a mean of 1 over the trees drafted
    weights: FloatArray
    accepted: Sequence[Sequence[int]] = ()  # accepted nodes of each verified tree


class AutoPolicy(NamedPolicy):
    """Policy that maximises weighted expected tokens per second in the long run; requests behind
    their SLOs and rows that end last in their call weigh more.

    A node, a draft level or a request's part of it is taken while it yields more tokens per second
    than the time yields in the long run, see :attr:`DepthControl.goodput`; that rate belongs to the
    depth and width chosen by running averages, see :class:`DepthControl`. If no shape is faster
    than plain decoding, speculation is off except for occasional looks, steps that draft only to
    renew the averages; while it is on, a few steps are plain, so that the time of both is known.
    Path probabilities are calibrated by observed acceptance, step times corrected by measured ones.
    """

    name = "auto"
    falls_back = True

    def __init__(
        self, config: PolicySettings, costs: StepCosts, history: SpeculationHistory | None = None
    ):
        super().__init__(config, costs)
        costs.keep_sizes()
        self.history = history or SpeculationHistory(config)
        self.budget = config.token_budget or affordable_tokens(costs)
        self._warned: WeakSet[Request] = WeakSet()
        self._outcome: _Outcome | None = None  # the current step's, if it drafted; set by `select`
        # Predictions that stand as long as the choice of a shape, each with what it is for:
        # limits of drafting, and seconds of steps without drafting by their number of nodes
        self._limits: tuple[tuple[int, ...], tuple[float, float, float]] = (), (0.0, 0.0, 0.0)
        self._verify_s: tuple[tuple[int, ...], FloatArray] = (), np.zeros(0)

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        num_keys = sum(len(request.tokens) for request in requests)
        urgencies = self._urgencies(requests, begun_s)
        plan = self._shape(requests, urgencies, num_keys, num_prefill_tokens)
        self._num_prefill_tokens = num_prefill_tokens
        if not plan.depth:
            return plan
        self._ends = row_weights(requests, self.costs)
        factors = [BEST_EFFORT_WEIGHT if r.is_best_effort else 1.0 for r in requests]
        self._weights = weights = urgencies * self._ends * np.array(factors)
        # read before drafting, which changes them
        self._num_behind = [request.num_draft_behind for request in requests]
        return self._limited(plan, requests, weights / weights.mean(), num_keys)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        num_requests = len(requests)
        num_keys = sum(len(request.tokens) for request in requests)
        num_prefill_tokens = self._num_prefill_tokens
        self._outcome = None
        # requests that were drafted for; the trees of all other requests are only roots
        drafting = requests if plan.drafting is None else plan.drafting
        if not (plan.depth and drafting):
            num_tokens = num_requests + num_prefill_tokens
            plain_s = self.costs.verify_s(num_tokens, num_requests, num_keys)
            return replace(Selection.of_roots(candidates), step_s=plain_s)
        forest = Forest.of(candidates)
        prediction = self.history.predict(requests, forest)
        num_behind = dict(zip(requests, self._num_behind, strict=True))
        max_depths = np.maximum.reduceat(forest.depths, forest.starts).tolist()
        max_depth = max(max_depths)
        draft_s = self.costs.draft_s(
            len(drafting),
            max_depth,
            plan.width,
            num_keys,
            sum(num_behind[request] for request in drafting),
            level_share(max_depths, len(drafting)),
        )
        times_s = self._verify_times(num_requests, num_keys, len(forest.depths))

        def alone_s(num_nodes: Any) -> Seconds:
            return times_s[num_nodes]

        def mixed_s(num_nodes: Count) -> Seconds:
            num_tokens = num_nodes + num_prefill_tokens
            return self.costs.verify_s(num_tokens, num_requests, num_keys)

        def priced(verify_s: Callable[[IntArray], Seconds]) -> StepTime:
            return lambda n: (s := draft_s + verify_s(n)) + self.costs.first_tokens.price_s(s)

        # Nodes deeper than what a request may still emit are never committed.
        num_left = [request.num_left for request in requests]
        values = self._weights[forest.tree_of] * prediction.path_probs
        if max_depth >= min(num_left):
            values *= forest.depths < np.array(num_left)[forest.tree_of]
        rate = self.history.depths.goodput * float(self._weights.sum())
        mixed = priced(mixed_s) if num_prefill_tokens else None
        is_verified = worthwhile_nodes(forest, values, self.budget, rate, priced(alone_s), mixed)
        drafted = Drafted(plan.depth, plan.width, len(drafting))
        ends = self._ends
        if len(drafting) < num_requests:
            drafted_for = set(drafting)
            ends = ends / ends[[request in drafted_for for request in requests]].mean()
        self._outcome = _Outcome(list(map(ref, requests)), prediction, is_verified, drafted, ends)
        expected = prediction.expected_tokens(is_verified)
        num_nodes = int(np.count_nonzero(is_verified))
        if num_nodes == num_requests and not num_prefill_tokens:
            self.history.depths.plain_looks.taken()
        verify_s = mixed_s(num_nodes) if num_prefill_tokens else alone_s(num_nodes)
        predicted_s = float(draft_s + verify_s)
        return Selection(forest.subtrees(is_verified), expected.tolist(), predicted_s)

    def _verify_times(self, num_requests: int, num_keys: int, max_nodes: int) -> FloatArray:
        """Return the predicted seconds of steps, drafting and prefill excluded, by their number of
        nodes.  -> [at least max_nodes + 1] f64
        """
        known_for = self.history.depths.num_choices, num_requests
        if self._verify_s[0] != known_for or len(self._verify_s[1]) <= max_nodes:
            sizes = np.arange(2 * max_nodes + 1)  # the trees of the next steps may be larger
            self._verify_s = known_for, self.costs.verify_s(sizes, num_requests, num_keys)
        return self._verify_s[1]

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        if self._outcome is not None:
            self._outcome.accepted = accepted
            self.history.observe(self._outcome)

    def _shape(
        self,
        requests: Sequence[Request],
        urgencies: FloatArray,
        num_keys: int,
        num_prefill_tokens: int,
    ) -> Plan:
        """Return a plan with depth, width and the requests to draft for."""
        num_requests = len(requests)
        depths = self.history.depths
        max_depth = max_useful_depth(requests, self.config.max_depth)
        max_width = min(max(self.config.draft_budget // num_requests, 1), self.config.max_width)
        shape_time = self._shape_time(requests, num_requests, num_keys)

        def probe_s(depth: int, width: int) -> Seconds:
            probed = _probed(requests)
            num_keys = sum(len(request.tokens) for request in probed)
            num_behind = sum(request.num_draft_behind for request in probed)
            return self.costs.draft_s(len(probed), depth, width, num_keys, num_behind)

        depth, width = depths.best(max_depth, max_width, num_requests, shape_time, probe_s)
        drafting = requests if depths.is_on else _probed(requests)

        def paying_shape(num_drafting: int, num_prefill_tokens: int = 0) -> tuple[int, int]:
            time = self._shape_time(requests, num_drafting, num_keys, num_prefill_tokens)
            depth, width, best, plain = depths.best_shape(max_depth, max_width, time)
            return (depth, width) if best > plain else (0, 1)

        if depth == 0 and not depths.is_on and (num_urgent := int((urgencies > 1.0).sum())):
            # Speculation that does not pay for all requests may still pay if urgent requests get
            # all nodes.
            drafting = requests
            depth, width = paying_shape(num_urgent)
        if depth and (due_s := self.costs.first_tokens.due_s) < np.inf:
            if not depths.is_look:
                depth, width = paying_shape(num_requests, num_prefill_tokens)
            num_behind = sum(request.num_draft_behind for request in drafting)
            draft_s = self.costs.draft_s(len(drafting), depth, width, num_keys, num_behind)
            num_tokens = num_requests + num_prefill_tokens
            if draft_s + self.costs.verify_s(num_tokens, num_requests, num_keys) > due_s:
                # decode plainly: the drafter must prefill whole prompts first, or the look takes
                # too long
                depth = 0
                width = 1
        return Plan(depth, width, drafting=drafting)

    def _limited(
        self, plan: Plan, requests: Sequence[Request], weights: FloatArray, num_keys: int
    ) -> Plan:
        """Return the plan with the limits on probabilities and gains below which drafting stops;
        the mean of ``weights`` is 1.
        """
        drafting = plan.drafting
        assert drafting is not None
        limits = self._limits_of(plan.width, len(requests), len(drafting), num_keys)
        factors = dict(zip(requests, weights.tolist(), strict=True)) if len(requests) > 1 else None
        return Plan(
            plan.depth,
            plan.width,
            *limits[:2],
            drafting=drafting,
            min_request_gain=limits[2],
            weights=factors,
        )

    def _limits_of(
        self, width: int, num_requests: int, num_drafting: int, num_keys: int
    ) -> tuple[float, float, float]:
        """Return ``min_path_prob``, ``min_gain`` and ``min_request_gain`` of a plan."""
        depths = self.history.depths
        known_for = depths.num_choices, width, num_requests, num_drafting
        if self._limits[0] != known_for:
            # A node or a level is worth its time if it may gain more tokens than that time yields
            # in the long run.
            goodput = depths.goodput * num_requests
            roots_s, more_s = (
                self.costs.verify_s(num_requests + n, num_requests, num_keys) for n in (0, SPAN)
            )
            num_drafted_keys = num_keys * num_drafting // num_requests
            parts_s = self.costs.level_parts_s(num_drafting, width, num_drafted_keys)
            # Drafters compare these limits with uncalibrated path probabilities of the last level
            # drafted, not of its children.
            per_s = goodput / (self.history.understated * depths.continuation(width))
            level, request = (each_s * per_s for each_s in parts_s)
            self._limits = known_for, ((more_s - roots_s) / SPAN * per_s, level, request)
        return self._limits[1]

    def _urgencies(self, requests: Sequence[Request], begun_s: float) -> FloatArray:
        """Return the weight of each request by how far it is behind its SLO, and log a warning for
        requests whose SLO is unattainable.  -> [num_requests] f64
        """
        if all(request.pace_s is None for request in requests):
            return np.ones(len(requests))
        history = self.history
        recent = self.costs.recent
        columns = [(r.pace_s or np.inf, *r.paced(begun_s)) for r in requests]
        progress = SLOProgress(*np.array(columns, np.float64).T)
        needed = progress.needed_rate(recent.step_s)
        has_history = history.depths.num_observed > MIN_DRAFTED_STEPS
        is_unattainable = (needed > UNATTAINABLE * history.max_tokens) & has_history
        for index in np.flatnonzero(is_unattainable).tolist():
            request = requests[index]
            # While windows are guaranteed, progress is that of one window, which says nothing about
            # the rest.
            if not request.has_open_guarantee and request not in self._warned:
                logger.log(
                    logging.INFO if self._warned else logging.WARNING,  # one warning per call
                    "request %d can no longer keep its pace of %.4g s per token and continues without its SLO: %s",
                    request.index,
                    request.pace_s,
                    f"it needs {needed[index]:.1f} tokens per step, and whole candidate trees yield "
                    f"{history.max_tokens:.1f}"
                    if needed[index] < MAX_NEEDED
                    else "the time that its SLO allows for all of its tokens has passed",
                )
                self._warned.add(request)
        cushion = progress.cushion(needed, recent.tokens, history.variance**0.5)
        return urgency(
            progress.behind(recent.step_s), cushion, is_unattainable, self.config.urgency
        )

    def _shape_time(
        self,
        requests: Sequence[Request],
        num_drafting: int,
        num_keys: int,
        num_prefill_tokens: int = 0,
    ) -> ShapeTime:
        """Return a function that predicts the seconds of a step by shape, including the price of
        first tokens that it delays, if ``num_drafting`` requests get nodes besides their roots.

        The time that the drafter spends on prefill first is spread over ``SETTLED_STEPS`` steps, so
        that speculation is switched on only if it gains more than that.
        """
        num_requests = len(requests)

        def seconds(
            depths: IntArray, widths: IntArray, tokens: FloatArray, nodes: FloatArray
        ) -> Seconds:
            num_behind = sum(request.num_draft_behind for request in requests)
            catch_up_s, settled_s = (
                self.costs.draft_s(num_requests, 1, 1, num_keys, first)
                for first in (num_behind, num_requests)
            )
            first_s = max(catch_up_s - settled_s, 0.0) / SETTLED_STEPS
            prompt_len = sum(request.prompt_len for request in requests) / num_requests
            num_committed = num_requests - num_drafting + num_drafting * tokens
            num_nodes = num_requests - num_drafting + num_drafting * nodes
            verify_s = self.costs.verify_s(num_nodes, num_requests, num_keys)
            draft_s = self.costs.steady_draft_s(
                num_requests, depths, widths, num_keys, num_committed, verify_s, prompt_len
            )
            step_s = draft_s + first_s * (depths > 0) + verify_s
            priced_s = step_s
            if num_prefill_tokens:
                num_tokens = num_nodes + num_prefill_tokens
                mixed_s = self.costs.verify_s(num_tokens, num_requests, num_keys)
                priced_s = step_s + (mixed_s - verify_s)
            return step_s + self.costs.first_tokens.price_s(priced_s)

        return seconds


def _probed(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that a look drafts for while speculation is off: those with the fewest
    tokens that the drafter has not processed.
    """
    return sorted(requests, key=attrgetter("num_draft_behind"))[:PROBED_REQUESTS]
