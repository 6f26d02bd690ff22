"""``Acceptance``, which predicts how many tokens every request commits, from draft probabilities
that are calibrated by observed acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, ranks_in_groups

# Change of a request's and of the overall log-odds shift per unexpectedly accepted node; the same
# is subtracted per unexpectedly rejected node.
REQUEST_RATE = 0.12
OVERALL_RATE = 0.01
MAX_SHIFT = 2.5  # largest absolute log-odds shift


class Drawing(IntEnum):
    """Method by which the target chooses a request's tokens."""

    GREEDY = 0  # the target takes the most probable token
    SAMPLED = 1  # the target samples, with noise that the draft does not know
    COUPLED = 2  # the target samples, with noise that also ranks the draft's proposals


# Number of nodes up to which a loop over nodes takes less time than one over levels in numpy
FEW_NODES = 64

# Temperature tau of coupled drafting, which takes softmax((log p + Gumbel noise) / tau) as draft
# probabilities; fitted to measured acceptance.
SHARPNESS = 0.9

# Prior: a favourite, i.e. the most probable child of its parent, with conditional probability c is
# accepted with probability c ** exponent. The exponent for greedy targets was fitted to the
# embedded pair of models, where favourites of 0.15 / 0.45 / 0.75 are accepted at rates 0.37 / 0.60
# / 0.88.
FAVOURITE_EXPONENTS = {Drawing.GREEDY: 0.6, Drawing.SAMPLED: 1.0, Drawing.COUPLED: 1.0}


class Speculated(Protocol):
    """A request whose draft tree's acceptance is predicted; hashable."""

    @property
    def drawing(self) -> Drawing:
        """Method by which the target chooses the request's tokens."""


@dataclass(frozen=True)
class Prediction:
    """Predicted acceptance of the candidate trees of one step."""

    forest: Forest
    drawings: Sequence[Drawing]  # one per tree
    conditionals: Conditionals  # the draft's probabilities, not calibrated
    # [num_nodes] f64, estimated probability that a node is accepted if its parent was.
    calibrated: FloatArray
    path_probs: FloatArray  # [num_nodes] f64, products of `calibrated` along paths

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """Return the predictions of several steps as one, with the trees of all of them."""
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
        """Return, for each :class:`Drawing` that occurs, the mask of the nodes of requests with
        that value.  -> [num_nodes] bool each
        """
        kinds = dict.fromkeys(self.drawings)
        if len(kinds) == 1:
            return dict.fromkeys(kinds, np.ones(len(self.forest.depths), dtype=np.bool_))
        by_tree = np.array(self.drawings)
        return {drawing: (by_tree == drawing)[self.forest.tree_of] for drawing in kinds}

    def expected_tokens(self, is_verified: BoolArray) -> FloatArray:
        """Return the number of tokens that each request is expected to commit if these nodes are
        verified.

        Args:
            is_verified: [num_nodes] bool, roots included.

        Returns:
            [num_requests] f64.
        """
        verified: FloatArray = self.path_probs * is_verified
        return np.bincount(self.forest.tree_of, verified).astype(np.float64)


class RequestShifts(WeakKeyDictionary["Speculated", float]):
    """Log-odds shift of each request. A pickled copy is empty, as another process has other
    requests.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestShifts, ()


class Acceptance:
    """Model of acceptance: the draft's conditional probabilities, calibrated over all requests and
    shifted for each request.

    There is one calibration per :class:`Drawing`. The log-odds of calibrated probabilities are then
    shifted by two amounts: one follows the prediction errors of all requests, the other the
    prediction errors of the single request, since texts differ in how predictable they are.
    """

    def __init__(self) -> None:
        self.calibrations = {
            drawing: Calibration(FAVOURITE_EXPONENTS[drawing]) for drawing in Drawing
        }
        self.overall = 0.0  # log-odds shift that applies to all requests
        self.request_shifts = RequestShifts()

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Return the predicted acceptance of all candidate nodes; ``forest`` holds one tree per
        request.
        """
        drawings = [request.drawing for request in requests]
        if len(forest.depths) == len(requests):  # the trees have no nodes but roots
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
        """Update calibrations and shifts from the acceptance in one step, or in several steps whose
        predictions were joined.

        Args:
            requests: one per tree of the prediction; None if the request no longer exists.
            prediction: the prediction for these trees.
            is_verified: [num_nodes] bool, the candidate nodes that were verified.
            accepted: [num_accepted] int64, accepted nodes as indices in the forest.
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
    """Draft probability of each node given its parent, and the node's rank among its siblings.
    Entries of roots are undefined.
    """

    probs: FloatArray  # [num_nodes] f64 in [0, 1]; 0 under a parent of path probability 0
    ranks: IntArray  # [num_nodes] int64, rank among siblings; 0: the most probable child

    @classmethod
    def of(cls, forest: Forest) -> Conditionals:
        """Return the conditional probabilities whose products along paths are the forest's path
        probabilities.
        """
        above = forest.path_probs[forest.parents]
        probs = np.divide(forest.path_probs, above, out=np.zeros(len(above)), where=above > 0.0)
        probs = np.minimum(probs, 1.0)
        if len(above) <= FEW_NODES:
            few_ranks = [0] * len(above)
            num_children = [0] * len(above)
            for node, parent in enumerate(forest.parents.tolist()):
                if node != parent:
                    few_ranks[node] = num_children[parent]
                    num_children[parent] += 1
            return cls(probs, np.array(few_ranks))
        # Stable, so siblings keep their order. The 0.5 sorts a root, which is its own parent,
        # before its children.
        order = np.argsort(forest.parents + (forest.depths > 0) * 0.5, kind="stable")
        parents = forest.parents[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (parents[1:] != parents[:-1]) | (forest.depths[order[:-1]] == 0)
        return cls(probs, ranks_in_groups(order, is_first))


def path_products(forest: Forest, conditionals: FloatArray) -> FloatArray:
    """Return the products of conditional probabilities along paths; they are 0 where the draft's
    path probability is 0.

    Args:
        forest: the trees.
        conditionals: [num_nodes] f64 in [0, 1].

    Returns:
        [num_nodes] f64.
    """
    path_probs = np.where(forest.depths == 0, 1.0, conditionals)
    if len(path_probs) <= FEW_NODES:
        few = path_probs.tolist()
        for node, (parent, depth) in enumerate(
            zip(forest.parents.tolist(), forest.depths.tolist(), strict=True)
        ):
            if depth:
                few[node] *= few[parent]
        path_probs = np.array(few)
        path_probs[~(forest.path_probs > 0.0)] = 0.0
        return path_probs
    for depth in range(1, int(forest.depths.max()) + 1):
        layer = np.flatnonzero(forest.depths == depth)
        path_probs[layer] *= path_probs[forest.parents[layer]]
    path_probs[~(forest.path_probs > 0.0)] = 0.0
    return path_probs


class Calibration:
    """Maps a draft's conditional probability to the rate at which such nodes were accepted when
    their parent was.

    A greedy target takes a good draft's most probable child more often than the draft's probability
    says, and a poor draft's less often. Acceptance is counted per bin of the conditional
    probability, separately for favourites (most probable children) and for other children; the
    prior counts as ``PRIOR`` observations. Calibrated probabilities stay in (0, 1], so path
    probabilities do not increase along a path and every prefix of the canonical order is a tree.
    """

    BINS = 10
    PRIOR = 4.0  # weight of the prior, in observations
    MEMORY = 1000.0  # observations per bin after which older ones fade

    def __init__(self, favourite_exponent: float = 1.0) -> None:
        """Set the prior: a favourite with conditional probability c is accepted with probability
        ``c ** favourite_exponent``.
        """
        self.favourite_exponent = favourite_exponent
        self.trials = np.zeros((2, self.BINS))  # [is favourite, bin]
        self.hits = np.zeros((2, self.BINS))

    def __call__(self, conditionals: Conditionals) -> FloatArray:
        """Return, for each node, the estimated probability that it is accepted if its parent was.
        -> [num_nodes] f64
        """
        prior = np.where(
            conditionals.ranks == 0, conditionals.probs**self.favourite_exponent, conditionals.probs
        )
        cell = self._cells(conditionals)
        calibrated: FloatArray = (self.hits[cell] + self.PRIOR * prior) / (
            self.trials[cell] + self.PRIOR
        )
        return calibrated

    def observe(self, conditionals: Conditionals, was_tried: BoolArray, was_hit: BoolArray) -> None:
        """Count the acceptance of verified nodes.

        Args:
            conditionals: the draft's conditional probabilities of all nodes.
            was_tried: [num_nodes] bool, True if the node was verified and its parent was accepted.
            was_hit: [num_nodes] bool, True if the node was accepted.
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
    """Add ``log_odds`` to the log-odds of probabilities; 0 and 1 do not change. The shape stays."""
    odds = np.exp(log_odds)
    moved: FloatArray = conditionals * odds / (1.0 - conditionals + conditionals * odds)
    return moved


def tried_and_hit(forest: Forest, accepted: IntArray) -> tuple[BoolArray, BoolArray]:
    """Return the masks of the nodes whose parent was accepted (or is a root), and of the nodes that
    were accepted.

    Args:
        forest: the trees.
        accepted: [num_accepted] int64, accepted nodes as indices in the forest, without roots.

    Returns:
        Two [num_nodes] bool.
    """
    was_hit = np.zeros(len(forest.depths), dtype=np.bool_)
    was_hit[accepted] = True
    is_root = forest.depths == 0
    return (was_hit | is_root)[forest.parents] & ~is_root, was_hit
