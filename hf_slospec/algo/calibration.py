"""What the draft's probabilities are worth: acceptance by conditional probability, learned while decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray, places_in_groups


@dataclass(frozen=True)
class Conditionals:
    """What a draft says of every node of a forest, given its parent. A root's entries mean nothing."""

    probs: FloatArray  # [num_nodes] f64 in [0, 1]; 0 under a parent of path probability 0
    ranks: IntArray  # [num_nodes] int64, 0 = its parent's first child, the draft's favourite

    @classmethod
    def of(cls, forest: Forest) -> Conditionals:
        """Those of its own path probabilities."""
        below = forest.path_probs[forest.parents]
        probs = np.divide(forest.path_probs, below, out=np.zeros(len(below)), where=below > 0.0)
        # Nodes of a tree ascend, so a stable sort by parent keeps siblings in order.
        order = np.argsort(forest.parents + (forest.depths > 0) * 0.5, kind="stable")  # roots before their children
        parents = forest.parents[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (parents[1:] != parents[:-1]) | (forest.depths[order[:-1]] == 0)
        return cls(np.minimum(probs, 1.0), places_in_groups(order, is_first))


def path_products(forest: Forest, conditionals: FloatArray) -> FloatArray:
    """Path probabilities of conditionals in [0, 1]; 0 where the draft says so.  -> [num_nodes]"""
    path_probs = np.where(forest.depths == 0, 1.0, conditionals)
    for depth in range(1, int(forest.depths.max()) + 1):
        layer = np.flatnonzero(forest.depths == depth)
        path_probs[layer] *= path_probs[forest.parents[layer]]
    path_probs[~(forest.path_probs > 0.0)] = 0.0
    return path_probs


class Calibration:
    """Replaces conditionals by how often children like them were accepted once their parent was.

    A greedy target takes a draft's favourite more often than the draft's probability says, a poor draft's less often.
    Acceptance is counted per bin of the conditional, for favourites (first children) and other children apart; what is
    believed before counts as ``PRIOR`` observations. Conditionals stay in (0, 1], so path probabilities still never
    rise along a path and every prefix of the canonical order stays connected.
    """

    GREEDY_EXPONENT = 0.6  # fits the embedded pair: favourites at 0.15 / 0.45 / 0.75 are accepted 0.37 / 0.60 / 0.88

    BINS = 10
    PRIOR = 4.0
    MEMORY = 1000.0  # observations per bin after which the oldest fade

    def __init__(self, favourite_exponent: float = 1.0) -> None:
        """Before any observation a favourite's conditional c is believed to be ``c ** favourite_exponent``."""
        self.favourite_exponent = favourite_exponent
        self.trials = np.zeros((2, self.BINS))  # [is favourite, bin]
        self.hits = np.zeros((2, self.BINS))

    def __call__(self, conditionals: Conditionals) -> FloatArray:
        """Calibrated conditionals.  -> [num_nodes] f64"""
        believed = np.where(conditionals.ranks == 0, conditionals.probs**self.favourite_exponent, conditionals.probs)
        cell = self._cells(conditionals)
        calibrated: FloatArray = (self.hits[cell] + self.PRIOR * believed) / (self.trials[cell] + self.PRIOR)
        return calibrated

    def observe(self, conditionals: Conditionals, was_tried: BoolArray, was_hit: BoolArray) -> None:
        """Take in verified nodes: those whose parent was committed, and those of them that were."""
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
    """Conditionals moved on the scale of log-odds; 0 and 1 stay.  -> as given"""
    odds = np.exp(log_odds)
    moved: FloatArray = conditionals * odds / (1.0 - conditionals + conditionals * odds)
    return moved


class Reliability:
    """Predicted against actual: how often children of a predicted probability were accepted.

    What reliability diagrams show, with the two usual figures of them.
    """

    BINS = 10

    def __init__(self) -> None:
        self.predicted, self.accepted, self.count = (np.zeros(self.BINS) for _ in range(3))  # [bin] sums
        self._squares = 0.0

    def observe(self, predicted: FloatArray, was_hit: FloatArray) -> None:
        """Take in predictions in [0, 1] and whether each came true, [n] both."""
        bins = np.minimum((predicted * self.BINS).astype(np.int64), self.BINS - 1)
        for sums, values in ((self.predicted, predicted), (self.accepted, was_hit), (self.count, None)):
            sums += np.bincount(bins, values, minlength=self.BINS)
        self._squares += float(((predicted - was_hit) ** 2).sum())

    @property
    def brier(self) -> float:
        """Mean squared error of the predicted probabilities (Brier score); nan without observations."""
        return self._squares / self.count.sum() if self.count.any() else float("nan")

    @property
    def ece(self) -> float:
        """Expected calibration error: mean distance of predicted and actual frequency over bins, by their counts."""
        return float(np.abs(self.predicted - self.accepted).sum() / self.count.sum()) if self.count.any() else np.nan


def tried_and_hit(forest: Forest, accepted: IntArray) -> tuple[BoolArray, BoolArray]:
    """Which nodes had their parent committed, and which were committed themselves.  -> two [num_nodes] bool

    Args:
        accepted: [num_accepted] int64, committed nodes of the forest, roots not among them.
    """
    was_hit = np.zeros(len(forest.depths), dtype=np.bool_)
    was_hit[accepted] = True
    is_root = forest.depths == 0
    return (was_hit | is_root)[forest.parents] & ~is_root, was_hit
