"""Calibrated path probabilities, which predict how many tokens every request commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Calibration, Conditionals, Reliability, path_products, shifted, tried_and_hit
from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray

REQUEST_RATE, OVERALL_RATE = 0.12, 0.01  # change of log-odds per unexpected acceptance or rejection
MAX_SHIFT = 2.5  # largest absolute shift of log-odds


class Drawing(IntEnum):
    """Way in which a request's tokens are chosen."""

    GREEDY = 0  # the target takes the most probable token
    SAMPLED = 1  # the target samples with noise that the draft does not know
    COUPLED = 2  # the target samples with noise by which the draft ranks its proposals, too


SHARPNESS = 0.9  # tau: coupled drafting's probabilities are softmax((log p + Gumbel noise) / tau); measured

# Prior: a favourite (first) child with conditional c is accepted with probability c ** exponent. The exponent for
# greedy targets fits the embedded pair: favourites at 0.15 / 0.45 / 0.75 are accepted 0.37 / 0.60 / 0.88.
FAVOURITE_EXPONENTS = {Drawing.GREEDY: 0.6, Drawing.SAMPLED: 1.0, Drawing.COUPLED: 1.0}


class Speculated(Protocol):
    """Request that a tree belongs to; hashable."""

    @property
    def drawing(self) -> Drawing:
        """Way in which the request's tokens are chosen."""


@dataclass(frozen=True)
class Prediction:
    """Predicted acceptance of one step's candidates."""

    forest: Forest
    drawings: Sequence[Drawing]  # one per tree
    conditionals: Conditionals  # the draft's probabilities
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
        """Return masks of the nodes whose request draws in each way.  -> [num_nodes] bool each"""
        kinds = dict.fromkeys(self.drawings)
        if len(kinds) == 1:
            return dict.fromkeys(kinds, np.ones(len(self.forest.depths), dtype=np.bool_))
        by_tree = np.array(self.drawings)
        return {drawing: (by_tree == drawing)[self.forest.tree_of] for drawing in kinds}

    def expected_tokens(self, is_verified: BoolArray) -> FloatArray:
        """Return the tokens each request is expected to commit if these nodes are verified.  -> [num_requests] f64

        Args:
            is_verified: [num_nodes] bool, roots included.
        """
        verified: FloatArray = self.path_probs * is_verified
        return np.bincount(self.forest.tree_of, verified).astype(np.float64)


class RequestShifts(WeakKeyDictionary["Speculated", float]):
    """Log-odds by request; pickled, it is empty, as another process has other requests."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestShifts, ()


class Acceptance:
    """Model of acceptance: the draft's conditionals, calibrated over all requests and shifted for each.

    There is one calibration per way of drawing. Log-odds are then shifted by a common amount, which follows the
    prediction errors of all requests, and by one per request, since texts differ in how predictable they are.
    Predictions and outcomes are recorded: reliability before and after calibration, sums by depth and by child rank.
    """

    def __init__(self, max_depth: int = 32, max_rank: int = 8) -> None:
        self.calibrations = {drawing: Calibration(FAVOURITE_EXPONENTS[drawing]) for drawing in Drawing}
        self.overall = 0.0  # log-odds shift of all requests
        self.request_shifts = RequestShifts()
        self.record = AcceptanceRecord(max_depth, max_rank)

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidates; ``forest`` holds one tree per request."""
        drawings = [request.drawing for request in requests]
        if len(forest.depths) == len(requests):  # roots only
            ones = np.ones(len(requests))
            return Prediction(forest, drawings, Conditionals(ones, np.zeros(len(requests), np.int64)), ones, ones)
        conditionals = Conditionals.of(forest)
        shifts = np.array([self.request_shifts.get(request, 0.0) for request in requests]) + self.overall
        first, *further = dict.fromkeys(drawings)
        unshifted = self.calibrations[first](conditionals)
        for drawing in further:
            is_drawn_so = (np.array(drawings) == drawing)[forest.tree_of]
            unshifted = np.where(is_drawn_so, self.calibrations[drawing](conditionals), unshifted)
        calibrated = shifted(unshifted, shifts[forest.tree_of])
        return Prediction(forest, drawings, conditionals, calibrated, path_products(forest, calibrated))

    def observe(
        self,
        requests: Sequence[Speculated | None],
        prediction: Prediction,
        is_verified: BoolArray,
        accepted: IntArray,
    ) -> None:
        """Learn from the outcome of one step, or of several steps whose predictions were joined.

        Args:
            requests: requests of the prediction, one per tree; None where the request no longer exists.
            prediction: the prediction for these trees.
            is_verified: [num_nodes] bool, the candidates that were verified.
            accepted: [num_accepted] int64, accepted nodes of the forest.
        """
        forest, calibrated = prediction.forest, prediction.calibrated
        was_tried, was_hit = tried_and_hit(forest, accepted)
        was_tried &= is_verified
        surplus = np.bincount(forest.tree_of, was_hit - calibrated * was_tried, minlength=len(requests))
        for request, error in zip(requests, surplus.tolist(), strict=True):
            if request is not None:
                shift = self.request_shifts.get(request, 0.0) + REQUEST_RATE * error
                self.request_shifts[request] = _bounded(shift)
        self.overall = _bounded(self.overall + OVERALL_RATE * float(surplus.sum()))
        for drawing, is_drawn_so in prediction.of_drawing().items():
            self.calibrations[drawing].observe(prediction.conditionals, was_tried & is_drawn_so, was_hit)
        self.record.add(prediction, was_tried, was_hit)


class AcceptanceRecord:
    """Predicted and actual acceptance of tried children, for reports; no decision depends on it.

    Steps are summed in groups, since numpy takes about as long for a small step as for a large one.
    """

    STEPS = 64  # steps per group

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
        """Sums by child rank.  -> [3, max_rank] f64: predicted acceptances, actual acceptances, tried children"""
        self._sum_up()
        return self._by_rank

    def _sum_up(self) -> None:
        if not self._steps:
            return
        probs, tried, hits, depths, ranks = (np.concatenate(parts) for parts in zip(*self._steps, strict=True))
        self._steps.clear()
        self._before.observe(probs, hits)
        self._after.observe(tried, hits)
        for sums, indices in ((self._by_depth, depths), (self._by_rank, ranks)):
            columns = np.minimum(indices, sums.shape[1] - 1)
            for row, values in zip(sums, (tried, hits, None), strict=True):
                row += np.bincount(columns, values, minlength=len(row))


def _bounded(shift: float) -> float:
    return min(max(shift, -MAX_SHIFT), MAX_SHIFT)
