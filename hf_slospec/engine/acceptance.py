"""Calibrated path probabilities, which predict how many tokens every request commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, ranks_in_groups

# change of log-odds per unexpected acceptance or rejection
REQUEST_RATE = 0.12
OVERALL_RATE = 0.01
MAX_SHIFT = 2.5  # largest absolute shift of log-odds


class Drawing(IntEnum):
    """Way in which a request's tokens are chosen."""

    GREEDY = 0  # the target takes the most probable token
    SAMPLED = 1  # the target samples with noise that the draft does not know
    COUPLED = 2  # the target samples with noise by which the draft ranks its proposals, too


SHARPNESS = (
    0.9  # tau: coupled drafting's probabilities are softmax((log p + Gumbel noise) / tau); measured
)

# Prior: a favourite (first) child with conditional c is accepted with probability c ** exponent.
# The exponent for greedy targets fits the embedded pair: favourites at 0.15 / 0.45 / 0.75 are
# accepted 0.37 / 0.60 / 0.88.
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
        columns = [
            (p.conditionals.probs, p.conditionals.ranks, p.calibrated, p.path_probs) for p in parts
        ]
        probs, ranks, calibrated, path_probs = map(np.concatenate, zip(*columns, strict=True))
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
        """Return the tokens each request is expected to commit if these nodes are verified.  ->
        [num_requests] f64

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
    """Model of acceptance: the draft's conditionals, calibrated over all requests and shifted for
    each.

    There is one calibration per way of drawing. Log-odds are then shifted by a common amount, which
    follows the prediction errors of all requests, and by one per request, since texts differ in how
    predictable they are."""

    def __init__(self) -> None:
        self.calibrations = {
            drawing: Calibration(FAVOURITE_EXPONENTS[drawing]) for drawing in Drawing
        }
        self.overall = 0.0  # log-odds shift of all requests
        self.request_shifts = RequestShifts()

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidates; ``forest`` holds one tree per request."""
        drawings = [request.drawing for request in requests]
        if len(forest.depths) == len(requests):  # roots only
            ones = np.ones(len(requests))
            return Prediction(
                forest, drawings, Conditionals(ones, np.zeros(len(requests), np.int64)), ones, ones
            )
        conditionals = Conditionals.of(forest)
        shifts = (
            np.array([self.request_shifts.get(request, 0.0) for request in requests]) + self.overall
        )
        first, *further = dict.fromkeys(drawings)
        unshifted = self.calibrations[first](conditionals)
        for drawing in further:
            is_drawn_so = (np.array(drawings) == drawing)[forest.tree_of]
            unshifted = np.where(is_drawn_so, self.calibrations[drawing](conditionals), unshifted)
        calibrated = shifted(unshifted, shifts[forest.tree_of])
        return Prediction(
            forest, drawings, conditionals, calibrated, path_products(forest, calibrated)
        )

    def observe(
        self,
        requests: Sequence[Speculated | None],
        prediction: Prediction,
        is_verified: BoolArray,
        accepted: IntArray,
    ) -> None:
        """Learn from the outcome of one step, or of several steps whose predictions were joined.

        Args:
            requests: requests of the prediction, one per tree; None where the request no longer
                exists.
            prediction: the prediction for these trees.
            is_verified: [num_nodes] bool, the candidates that were verified.
            accepted: [num_accepted] int64, accepted nodes of the forest.
        """
        forest = prediction.forest
        calibrated = prediction.calibrated
        was_tried, was_hit = tried_and_hit(forest, accepted)
        was_tried &= is_verified
        surplus = np.bincount(
            forest.tree_of, was_hit - calibrated * was_tried, minlength=len(requests)
        )
        for request, error in zip(requests, surplus.tolist(), strict=True):
            if request is not None:
                shift = self.request_shifts.get(request, 0.0) + REQUEST_RATE * error
                self.request_shifts[request] = _bounded(shift)
        self.overall = _bounded(self.overall + OVERALL_RATE * float(surplus.sum()))
        for drawing, is_drawn_so in prediction.of_drawing().items():
            self.calibrations[drawing].observe(
                prediction.conditionals, was_tried & is_drawn_so, was_hit
            )


def _bounded(shift: float) -> float:
    return min(max(shift, -MAX_SHIFT), MAX_SHIFT)


@dataclass(frozen=True)
class Conditionals:
    """Draft probabilities of a forest's nodes given their parents. Entries of roots are undefined."""

    probs: FloatArray  # [num_nodes] f64 in [0, 1]; 0 under a parent of path probability 0
    ranks: (
        IntArray  # [num_nodes] int64, rank among the siblings; 0: the draft's most probable child
    )

    @classmethod
    def of(cls, forest: Forest) -> Conditionals:
        """Return the conditionals whose products are the forest's path probabilities."""
        above = forest.path_probs[forest.parents]
        probs = np.divide(forest.path_probs, above, out=np.zeros(len(above)), where=above > 0.0)
        # Nodes of a tree ascend, so a stable sort by parent keeps siblings in order.
        # Roots before their children.
        order = np.argsort(forest.parents + (forest.depths > 0) * 0.5, kind="stable")
        parents = forest.parents[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (parents[1:] != parents[:-1]) | (forest.depths[order[:-1]] == 0)
        return cls(np.minimum(probs, 1.0), ranks_in_groups(order, is_first))


def path_products(forest: Forest, conditionals: FloatArray) -> FloatArray:
    """Return the products of conditionals along paths; 0 where the draft's path probability is 0.
    -> [num_nodes] f64

    Args:
        conditionals: [num_nodes] f64 in [0, 1].
    """
    path_probs = np.where(forest.depths == 0, 1.0, conditionals)
    for depth in range(1, int(forest.depths.max()) + 1):
        layer = np.flatnonzero(forest.depths == depth)
        path_probs[layer] *= path_probs[forest.parents[layer]]
    path_probs[~(forest.path_probs > 0.0)] = 0.0
    return path_probs


class Calibration:
    """Map from draft conditionals to how often such children were accepted, given that their parent
    was.

    A greedy target takes a good draft's most probable child more often than the draft's probability
    says, and a poor draft's less often. Acceptance is counted per bin of the conditional,
    separately for favourites (first children) and other children; the prior counts as ``PRIOR``
    observations. Conditionals stay in (0, 1], so path probabilities never rise along a path and
    every prefix of the canonical order stays connected."""

    BINS = 10
    PRIOR = 4.0  # observations
    MEMORY = 1000.0  # observations per bin after which the oldest fade

    def __init__(self, favourite_exponent: float = 1.0) -> None:
        """Set the prior: a favourite with conditional c is accepted with probability ``c **
        favourite_exponent``.
        """
        self.favourite_exponent = favourite_exponent
        self.trials = np.zeros((2, self.BINS))  # [is favourite, bin]
        self.hits = np.zeros((2, self.BINS))

    def __call__(self, conditionals: Conditionals) -> FloatArray:
        """Return calibrated conditionals.  -> [num_nodes] f64"""
        prior = np.where(
            conditionals.ranks == 0, conditionals.probs**self.favourite_exponent, conditionals.probs
        )
        cell = self._cells(conditionals)
        calibrated: FloatArray = (self.hits[cell] + self.PRIOR * prior) / (
            self.trials[cell] + self.PRIOR
        )
        return calibrated

    def observe(self, conditionals: Conditionals, was_tried: BoolArray, was_hit: BoolArray) -> None:
        """Learn from verified nodes.

        Args:
            conditionals: the draft's probabilities of all nodes.
            was_tried: [num_nodes] bool, the node was verified and its parent committed.
            was_hit: [num_nodes] bool, the node was committed.
        """
        is_favourite, bins = self._cells(conditionals)
        cell = (is_favourite * self.BINS + bins)[was_tried]
        for sums, values in ((self.trials, None), (self.hits, was_hit[was_tried])):
            sums += np.bincount(cell, values, minlength=sums.size).reshape(sums.shape)
        fade = np.minimum(1.0, self.MEMORY / np.maximum(self.trials, 1.0))
        self.trials *= fade
        self.hits *= fade

    def _cells(self, conditionals: Conditionals) -> tuple[IntArray, IntArray]:
        bins = np.minimum((conditionals.probs * self.BINS).astype(np.int64), self.BINS - 1)
        return (conditionals.ranks == 0).astype(np.int64), bins


def shifted(conditionals: FloatArray, log_odds: FloatArray) -> FloatArray:
    """Return the conditionals shifted on the scale of log-odds; 0 and 1 stay.  -> shape as given"""
    odds = np.exp(log_odds)
    moved: FloatArray = conditionals * odds / (1.0 - conditionals + conditionals * odds)
    return moved


def tried_and_hit(forest: Forest, accepted: IntArray) -> tuple[BoolArray, BoolArray]:
    """Return the nodes whose parent was committed, and the nodes that were committed.  -> two
    [num_nodes] bool

    Args:
        accepted: [num_accepted] int64, accepted nodes of the forest, without roots.
    """
    was_hit = np.zeros(len(forest.depths), dtype=np.bool_)
    was_hit[accepted] = True
    is_root = forest.depths == 0
    return (was_hit | is_root)[forest.parents] & ~is_root, was_hit
