"""Calibrated path probabilities, which predict the committed tokens of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Calibration, Conditionals, Reliability, path_products, shifted, tried_and_hit
from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray

OWN_RATE, OVERALL_RATE = 0.12, 0.01  # change of log-odds per unexpected acceptance or rejection
MAX_SHIFT = 2.5  # bound of a shift of log-odds


class Drawing(IntEnum):
    """Way in which a request's tokens are chosen, and what its draft knows of it."""

    GREEDY = 0  # the target takes the most probable token
    SAMPLED = 1  # it draws by noise that the draft does not know
    COUPLED = 2  # it draws by noise that the draft ranks its proposals with


SHARPNESS = 0.9  # tau: coupled drafting's probabilities are softmax((log p + Gumbel noise) / tau); measured

# Before anything is learned, a favourite child with conditional c is accepted with probability c ** exponent. That of
# greedy targets fits the embedded pair: favourites at 0.15 / 0.45 / 0.75 are accepted 0.37 / 0.60 / 0.88.
FAVOURITE_EXPONENTS = {Drawing.GREEDY: 0.6, Drawing.SAMPLED: 1.0, Drawing.COUPLED: 1.0}


class Speculated(Protocol):
    """Request that a tree belongs to; hashable."""

    @property
    def drawing(self) -> Drawing:
        """Return how its tokens are chosen."""


@dataclass(frozen=True)
class Prediction:
    """Predicted acceptance of one step's candidates."""

    forest: Forest
    drawings: IntArray  # [num_nodes] int64, of the node's request
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

    One calibration for each way of drawing learns how often children of a draft probability are accepted. On the scale
    of log-odds, one shift follows the prediction errors of all requests and one those of each request, since texts
    differ in how predictable they are. Predictions are recorded next to outcomes: reliability before and after
    calibration, and sums by depth and by child rank.
    """

    def __init__(self, max_depth: int = 32, max_rank: int = 8) -> None:
        self.calibrations = {drawing: Calibration(FAVOURITE_EXPONENTS[drawing]) for drawing in Drawing}
        self.overall = 0.0  # shift of all requests
        self.own: WeakKeyDictionary[Speculated, float] = WeakKeyDictionary()  # shift of each request
        self.before, self.after = Reliability(), Reliability()  # of the draft's and of the calibrated conditionals
        # [depth] and [rank]: predicted acceptances, actual acceptances, tried children
        self.by_depth, self.by_rank = np.zeros((3, max_depth + 1)), np.zeros((3, max_rank))

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidates; ``forest`` holds one tree per request."""
        conditionals = Conditionals.of(forest)
        drawings = np.array([request.drawing for request in requests])[forest.tree_of]
        shifts = np.array([self.own.get(request, 0.0) for request in requests]) + self.overall
        unshifted = np.zeros(len(drawings))
        for drawing in np.unique(drawings).tolist():
            unshifted = np.where(drawings == drawing, self.calibrations[drawing](conditionals), unshifted)
        calibrated = shifted(unshifted, shifts[forest.tree_of])
        return Prediction(forest, drawings, conditionals, calibrated, path_products(forest, calibrated))

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
        for drawing in np.unique(prediction.drawings).tolist():
            is_own = prediction.drawings == drawing
            self.calibrations[drawing].observe(prediction.conditionals, was_tried & is_own, was_hit)

        tried, hits = calibrated[was_tried], was_hit[was_tried].astype(np.float64)
        self.before.observe(prediction.conditionals.probs[was_tried], hits)
        self.after.observe(tried, hits)
        for sums, at in ((self.by_depth, forest.depths), (self.by_rank, prediction.conditionals.ranks)):
            places = np.minimum(at[was_tried], sums.shape[1] - 1)
            for row, values in zip(sums, (tried, hits, None), strict=True):
                row += np.bincount(places, values, minlength=len(row))
