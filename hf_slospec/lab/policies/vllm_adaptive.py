"""vLLM's adaptive verification, as in vLLM 0.33.0 (November 1, 2026): an acceptance estimator
that is fitted online, and the policy that chooses by it how many drafted tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.engine.acceptance import Conditionals, path_products, tried_and_hit
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.engine.latency_curves import Count, Seconds
from hf_slospec.policies.registry import (
    MAX_BUDGET,
    NamedPolicy,
    max_useful_depth,
    without_useless_nodes,
)
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.select import best_ratio_nodes
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree

# Constants of vLLM 0.33.0
MAX_LOG_ODDS = 40.0  # log-odds are clipped to this absolute value
SLOPE = 0.5  # before the first fit
INTERCEPT = -0.2  # before the first fit, at every depth
FIT_STEPS = 100  # steps between two fits
DAMPING = 50.0  # a fit to n tokens takes the share n / (n + DAMPING) of its Newton step
RIDGE = 1e-3  # added to the diagonal of the normal equations


class AcceptanceEstimator:
    """Predicts whether a draft token is accepted if the tokens before it are: with probability
    sigmoid(slope * x + intercept of its depth), where x is the log-odds of its draft probability.

    The coefficients are fitted by logistic regression, one damped Newton step every ``FIT_STEPS``
    steps, to the tokens verified since the last fit: accepted ones, and the first rejected one of
    each request (vLLM pull request #52228).

    Args:
        max_depth: greatest depth of a token; every depth has an intercept.
    """

    def __init__(self, max_depth: int):
        self.slope = SLOPE
        # [max_depth + 1] f64, by depth; the entry of depth 0, where roots are, is not used
        self.intercepts = np.full(max_depth + 1, INTERCEPT)
        self._num_steps = 0  # since the last fit
        self._clear()

    def predict(self, log_odds: FloatArray, depths: IntArray) -> FloatArray:
        """Return the probability that each token is accepted if those before it are.

        Args:
            log_odds: [num_tokens] f64, of the draft probabilities.
            depths: [num_tokens] int64, 1 for a child of the root.

        Returns:
            [num_tokens] f64.
        """
        scores = self.slope * log_odds + self.intercepts[depths]
        predicted: FloatArray = np.exp(-np.logaddexp(0.0, -scores))
        return predicted

    def observe(self, log_odds: FloatArray, depths: IntArray, was_hit: BoolArray) -> None:
        """Count the tokens of one step whose predecessors were accepted.

        Args:
            log_odds: [num_tokens] f64, of the draft probabilities.
            depths: [num_tokens] int64, 1 for a child of the root.
            was_hit: [num_tokens] bool, True if the token was accepted.
        """
        predicted = self.predict(log_odds, depths)
        weights = predicted * (1.0 - predicted)
        errors = was_hit - predicted
        columns = (weights * log_odds**2, weights * log_odds, weights, errors * log_odds, errors)
        for sums, values in zip(self._sums, (*columns, np.ones_like(errors)), strict=True):
            sums += np.bincount(depths, values, minlength=len(sums))
        self._num_steps += 1
        if self._num_steps >= FIT_STEPS:
            self._fit()
            self._num_steps = 0
            self._clear()

    def _clear(self) -> None:
        # [6, max_depth + 1] f64, sums over the tokens of each depth since the last fit: the Hessian's
        # entries (slope and slope, slope and intercept, intercept and intercept), the gradient's
        # (slope, intercept), and the number of tokens.
        self._sums = np.zeros((6, len(self.intercepts)))

    def _fit(self) -> None:
        """Take one Newton step, whose slope part is damped by the number of all tokens and whose
        intercepts by that of their depth. A step that would make the slope negative leaves it.
        """
        slopes, mixed, own, slope_errors, errors, counts = self._sums
        own = own + RIDGE
        # Intercepts of different depths do not interact, so they are eliminated one by one.
        curvature = slopes.sum() + RIDGE - (mixed**2 / own).sum()
        change = float((slope_errors.sum() - (mixed * errors / own).sum()) / curvature)
        change *= float(counts.sum() / (counts.sum() + DAMPING))
        if self.slope + change < 0.0:
            change = 0.0
        self.slope += change
        self.intercepts += (errors - mixed * change) / own * counts / (counts + DAMPING)


def log_odds_of(probs: FloatArray) -> FloatArray:
    """Return log(p / (1 - p)), clipped to ``MAX_LOG_ODDS``. The shape stays."""
    with np.errstate(divide="ignore"):
        log_odds: FloatArray = np.log(probs) - np.log1p(-probs)
    return np.clip(log_odds, -MAX_LOG_ODDS, MAX_LOG_ODDS)


# vLLM's estimator lives as long as its worker, and a policy only as long as one call of `generate`.
_ESTIMATORS: WeakKeyDictionary[StepCosts, AcceptanceEstimator] = WeakKeyDictionary()


class VLLMAdaptivePolicy(NamedPolicy):
    """Policy that drafts chains of ``max_depth`` tokens and verifies as many of them as maximise
    the expected tokens per second (vLLM pull request #47808).

    The tokens of all requests are ranked by survival probability, the product of the estimated
    acceptance probabilities along their path, and the best ones are verified. SLOs are ignored,
    and all levels are drafted before the choice. The estimator is kept between calls with the same
    models.

    Different here: vLLM chooses the number of tokens by probabilities of an earlier step, as those
    of the step are not on the host yet; here both choices are made by those of the step."""

    name = "vllm-adaptive"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        estimator = _ESTIMATORS.get(costs)
        if estimator is None or len(estimator.intercepts) != config.max_depth + 1:
            estimator = _ESTIMATORS[costs] = AcceptanceEstimator(config.max_depth)
        self.estimator = estimator

    @classmethod
    def max_nodes(cls, config: PolicySettings) -> int:
        return config.max_depth

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        self._num_prefill_tokens = num_prefill_tokens
        return Plan(max_useful_depth(requests, self.config.max_depth), 1)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        forest = Forest.of(without_useless_nodes(requests, candidates))
        log_odds = log_odds_of(Conditionals.of(forest).probs)
        survival = path_products(forest, self.estimator.predict(log_odds, forest.depths))

        def step_s(num_nodes: Count) -> Seconds:
            return self.costs.shape_s(requests, plan.depth, 1, num_nodes + self._num_prefill_tokens)

        is_verified = best_ratio_nodes(forest, survival, MAX_BUDGET, step_s)
        self._verified = Forest.of(forest.subtrees(is_verified))
        self._log_odds = log_odds[is_verified]
        expected = np.bincount(forest.tree_of, survival * is_verified)
        return Selection(
            self._verified.trees, expected.tolist(), float(step_s(int(is_verified.sum())))
        )

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        verified = self._verified
        was_tried, was_hit = tried_and_hit(verified, verified.indices(accepted))
        self.estimator.observe(
            self._log_odds[was_tried], verified.depths[was_tried], was_hit[was_tried]
        )
