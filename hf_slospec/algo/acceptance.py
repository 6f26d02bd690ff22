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
    drawings: Sequence[Drawing]  # by tree
    conditionals: Conditionals  # the draft's conditional probabilities
    calibrated: FloatArray  # [num_nodes] f64, calibrated conditionals
    path_probs: FloatArray  # [num_nodes] f64, products of the calibrated conditionals along paths

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """Return the predictions of several steps as one, with the trees of all."""
        if len(parts) == 1:
            return parts[0]
        probs, ranks, calibrated, path_probs = (
            np.concatenate(columns)
            for columns in zip(
                *((p.conditionals.probs, p.conditionals.ranks, p.calibrated, p.path_probs) for p in parts), strict=True
            )
        )
        forest = Forest.of([tree for part in parts for tree in part.forest.trees])
        drawings = [drawing for part in parts for drawing in part.drawings]
        return cls(forest, drawings, Conditionals(probs, ranks), calibrated, path_probs)

    def of_drawing(self) -> dict[Drawing, BoolArray]:
        """Return which nodes belong to requests of each way of drawing.  -> [num_nodes] bool each"""
        kinds = dict.fromkeys(self.drawings)
        if len(kinds) == 1:
            return dict.fromkeys(kinds, np.ones(len(self.forest.depths), dtype=np.bool_))
        of_trees = np.array(self.drawings)
        return {drawing: (of_trees == drawing)[self.forest.tree_of] for drawing in kinds}

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
        self.record = AcceptanceRecord(max_depth, max_rank)

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidates; ``forest`` holds one tree per request."""
        conditionals, drawings = Conditionals.of(forest), [request.drawing for request in requests]
        shifts = np.array([self.own.get(request, 0.0) for request in requests]) + self.overall
        first, *others = dict.fromkeys(drawings)
        unshifted = self.calibrations[first](conditionals)
        for drawing in others:
            is_own = (np.array(drawings) == drawing)[forest.tree_of]
            unshifted = np.where(is_own, self.calibrations[drawing](conditionals), unshifted)
        calibrated = shifted(unshifted, shifts[forest.tree_of])
        return Prediction(forest, drawings, conditionals, calibrated, path_products(forest, calibrated))

    def observe(
        self,
        requests: Sequence[Speculated | None],
        prediction: Prediction,
        is_verified: BoolArray,
        accepted: IntArray,
    ) -> None:
        """Learn from the outcome of one step, or of several whose predictions were joined.

        Args:
            requests: those of the prediction, one per tree; None for those that are gone.
            prediction: the prediction for these trees.
            is_verified: [num_nodes] bool, the candidates that were verified.
            accepted: [num_accepted] int64, accepted nodes of the forest.
        """
        forest, calibrated = prediction.forest, prediction.calibrated
        was_tried, was_hit = tried_and_hit(forest, accepted)
        was_tried &= is_verified
        surplus = np.bincount(forest.tree_of, was_hit - calibrated * was_tried, minlength=len(requests))
        for request, own in zip(requests, surplus.tolist(), strict=True):
            if request is not None:
                self.own[request] = _bounded(self.own.get(request, 0.0) + OWN_RATE * own)
        self.overall = _bounded(self.overall + OVERALL_RATE * float(surplus.sum()))
        for drawing, is_own in prediction.of_drawing().items():
            self.calibrations[drawing].observe(prediction.conditionals, was_tried & is_own, was_hit)
        self.record.add(prediction, was_tried, was_hit)


class AcceptanceRecord:
    """Predicted and actual acceptance of tried children, for reports: no decision depends on it.

    Steps are summed up many at a time, since a step of one request takes as long to sum up as one of a hundred.
    """

    STEPS = 64  # summed up together

    def __init__(self, max_depth: int, max_rank: int) -> None:
        self._before, self._after = Reliability(), Reliability()
        self._by_depth, self._by_rank = np.zeros((3, max_depth + 1)), np.zeros((3, max_rank))
        self._steps = list[tuple[FloatArray | IntArray | BoolArray, ...]]()

    def add(self, prediction: Prediction, was_tried: BoolArray, was_hit: BoolArray) -> None:
        """Record one step; both arrays are [num_nodes]."""
        conditionals = prediction.conditionals
        columns = (conditionals.probs, prediction.calibrated, was_hit, prediction.forest.depths, conditionals.ranks)
        self._steps.append(tuple(column[was_tried] for column in columns))
        if len(self._steps) >= self.STEPS:
            self._sum_up()

    @property
    def before(self) -> Reliability:
        """Reliability of the draft's conditionals."""
        self._sum_up()
        return self._before

    @property
    def after(self) -> Reliability:
        """Reliability of the calibrated conditionals."""
        self._sum_up()
        return self._after

    @property
    def by_depth(self) -> FloatArray:
        """Sums by depth.  -> [3, max_depth + 1] f64: predicted acceptances, actual acceptances, tried children"""
        self._sum_up()
        return self._by_depth

    @property
    def by_rank(self) -> FloatArray:
        """Likewise by child rank.  -> [3, max_rank] f64"""
        self._sum_up()
        return self._by_rank

    def _sum_up(self) -> None:
        if not self._steps:
            return
        probs, tried, hits, depths, ranks = (np.concatenate(parts) for parts in zip(*self._steps, strict=True))
        self._steps.clear()
        self._before.observe(probs, hits)
        self._after.observe(tried, hits)
        for sums, at in ((self._by_depth, depths), (self._by_rank, ranks)):
            places = np.minimum(at, sums.shape[1] - 1)
            for row, values in zip(sums, (tried, hits, None), strict=True):
                row += np.bincount(places, values, minlength=len(row))


def _bounded(shift: float) -> float:
    return min(max(shift, -MAX_SHIFT), MAX_SHIFT)
