"""Calibrated path probabilities, which predict the committed tokens of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Calibration, Conditionals, Reliability, path_products, shifted, tried_and_hit
from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray

OWN_RATE, OVERALL_RATE = 0.12, 0.01  # change of log-odds per unexpected acceptance or rejection
MAX_SHIFT = 2.5  # bound of a shift of log-odds


class Speculated(Protocol):
    """Request that a tree belongs to; hashable."""

    @property
    def is_sampled(self) -> bool:
        """Return whether the target samples its tokens; a greedy target takes the most probable ones."""


@dataclass(frozen=True)
class Prediction:
    """Predicted acceptance of one step's candidates."""

    forest: Forest
    is_sampled: BoolArray  # [num_nodes], whether the node's request is sampled
    conditionals: Conditionals  # of the draft
    calibrated: FloatArray  # [num_nodes] f64, calibrated conditionals
    path_probs: FloatArray  # [num_nodes] f64, products of the calibrated conditionals along paths

    def expected_tokens(self, is_verified: BoolArray) -> FloatArray:
        """Return the tokens each request should commit if these nodes are verified.  -> [num_requests] f64

        Args:
            is_verified: [num_nodes] bool, roots included.
        """
        verified: FloatArray = self.path_probs * is_verified
        return np.bincount(self.forest.tree_of, verified).astype(np.float64)


class Acceptance:
    """Model of acceptance: the draft's conditionals, calibrated over all requests and shifted for each.

    One calibration for sampled and one for greedy requests learn how often children of a draft probability are
    accepted. On the scale of log-odds, one shift follows the prediction errors of all requests and one those of each
    request, since texts differ in how predictable they are. Predictions are recorded next to outcomes: reliability
    before and after calibration, and sums by depth and by child rank.
    """

    def __init__(self, max_depth: int = 32, max_rank: int = 8) -> None:
        self.sampled, self.greedy = Calibration(), Calibration(Calibration.GREEDY_EXPONENT)
        self.overall = 0.0  # shift of all requests
        self.own: WeakKeyDictionary[Speculated, float] = WeakKeyDictionary()  # shift of each request
        self.before, self.after = Reliability(), Reliability()  # of the draft's and of the calibrated conditionals
        # [depth] and [rank]: predicted acceptances, actual acceptances, tried children
        self.by_depth, self.by_rank = np.zeros((3, max_depth + 1)), np.zeros((3, max_rank))

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidates; ``forest`` holds one tree per request."""
        conditionals = Conditionals.of(forest)
        is_sampled = np.array([request.is_sampled for request in requests])[forest.tree_of]
        shifts = np.array([self.own.get(request, 0.0) for request in requests]) + self.overall
        if is_sampled.all() or not is_sampled.any():
            unshifted = (self.sampled if is_sampled[0] else self.greedy)(conditionals)
        else:
            unshifted = np.where(is_sampled, self.sampled(conditionals), self.greedy(conditionals))
        calibrated = shifted(unshifted, shifts[forest.tree_of])
        return Prediction(forest, is_sampled, conditionals, calibrated, path_products(forest, calibrated))

    def observe(
        self,
        requests: Sequence[Speculated],
        prediction: Prediction,
        is_verified: BoolArray,
        accepted: IntArray,
    ) -> None:
        """Learn from the outcome of one step.

        Args:
            requests: those of the prediction.
            prediction: the prediction for this step.
            is_verified: [num_nodes] bool, the candidates that were verified.
            accepted: [num_accepted] int64, accepted nodes of the forest.
        """
        forest, calibrated = prediction.forest, prediction.calibrated
        was_tried, was_hit = tried_and_hit(forest, accepted)
        was_tried &= is_verified
        surplus = np.bincount(forest.tree_of, was_hit - calibrated * was_tried, minlength=len(requests))
        moved = np.array([self.own.get(request, 0.0) for request in requests]) + OWN_RATE * surplus
        self.own.update(zip(requests, np.clip(moved, -MAX_SHIFT, MAX_SHIFT).tolist(), strict=True))
        self.overall = float(np.clip(self.overall + OVERALL_RATE * surplus.sum(), -MAX_SHIFT, MAX_SHIFT))
        for calibration, is_own in ((self.sampled, prediction.is_sampled), (self.greedy, ~prediction.is_sampled)):
            if is_own.any():
                calibration.observe(prediction.conditionals, was_tried & is_own, was_hit)

        tried, hits = calibrated[was_tried], was_hit[was_tried].astype(np.float64)
        self.before.observe(prediction.conditionals.probs[was_tried], hits)
        self.after.observe(tried, hits)
        for sums, at in ((self.by_depth, forest.depths), (self.by_rank, prediction.conditionals.ranks)):
            places = np.minimum(at[was_tried], sums.shape[1] - 1)
            for row, values in zip(sums, (tried, hits, None), strict=True):
                row += np.bincount(places, values, minlength=len(row))
