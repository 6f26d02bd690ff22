"""Calibration of draft probabilities: acceptance by conditional probability, learned while decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray, ranks_in_groups


@dataclass(frozen=True)
class Conditionals:
    """Draft probabilities of a forest's nodes given their parents. Entries of roots are undefined."""

    probs: FloatArray  # [num_nodes] f64 in [0, 1]; 0 under a parent of path probability 0
    ranks: IntArray  # [num_nodes] int64, rank among the siblings; 0: the draft's most probable child

    @classmethod
    def of(cls, forest: Forest) -> Conditionals:
        """Return the conditionals whose products are the forest's path probabilities."""
        above = forest.path_probs[forest.parents]
        probs = np.divide(forest.path_probs, above, out=np.zeros(len(above)), where=above > 0.0)
        # Nodes of a tree ascend, so a stable sort by parent keeps siblings in order.
        order = np.argsort(forest.parents + (forest.depths > 0) * 0.5, kind="stable")  # roots before their children
        parents = forest.parents[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (parents[1:] != parents[:-1]) | (forest.depths[order[:-1]] == 0)
        return cls(np.minimum(probs, 1.0), ranks_in_groups(order, is_first))


def path_products(forest: Forest, conditionals: FloatArray) -> FloatArray:
    """Return the products of conditionals along paths; 0 where the draft's path probability is 0.  -> [num_nodes] f64

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
    """Map from draft conditionals to how often such children were accepted, given that their parent was.

    A greedy target takes a good draft's most probable child more often than the draft's probability says, and a poor
    draft's less often. Acceptance is counted per bin of the conditional, separately for favourites (first children)
    and other children; the prior counts as ``PRIOR`` observations. Conditionals stay in (0, 1], so path probabilities
    never rise along a path and every prefix of the canonical order stays connected.
    """

    BINS = 10
    PRIOR = 4.0  # observations
    MEMORY = 1000.0  # observations per bin after which the oldest fade

    def __init__(self, favourite_exponent: float = 1.0) -> None:
        """Set the prior: a favourite with conditional c is accepted with probability ``c ** favourite_exponent``."""
        self.favourite_exponent = favourite_exponent
        self.trials = np.zeros((2, self.BINS))  # [is favourite, bin]
        self.hits = np.zeros((2, self.BINS))

    def __call__(self, conditionals: Conditionals) -> FloatArray:
        """Return calibrated conditionals.  -> [num_nodes] f64"""
        prior = np.where(conditionals.ranks == 0, conditionals.probs**self.favourite_exponent, conditionals.probs)
        cell = self._cells(conditionals)
        calibrated: FloatArray = (self.hits[cell] + self.PRIOR * prior) / (self.trials[cell] + self.PRIOR)
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


class Reliability:
    """Predicted against actual acceptance by bin, as in a reliability diagram, with Brier score and ECE."""

    BINS = 10

    def __init__(self) -> None:
        self.predicted, self.accepted, self.count = (np.zeros(self.BINS) for _ in range(3))  # [bin] sums
        self._squares = 0.0

    def observe(self, predicted: FloatArray, was_hit: FloatArray) -> None:
        """Record predictions in [0, 1] and their outcomes, 1.0 or 0.0; [n] both."""
        bins = np.minimum((predicted * self.BINS).astype(np.int64), self.BINS - 1)
        for sums, values in ((self.predicted, predicted), (self.accepted, was_hit), (self.count, None)):
            sums += np.bincount(bins, values, minlength=self.BINS)
        self._squares += float(((predicted - was_hit) ** 2).sum())

    @property
    def brier(self) -> float:
        """Return the Brier score, the mean squared error of the predictions; nan without observations."""
        return self._squares / self.count.sum() if self.count.any() else float("nan")

    @property
    def ece(self) -> float:
        """Return the expected calibration error; nan without observations.

        It is the mean of ``|predicted - actual|`` over bins, weighted by their counts.
        """
        return float(np.abs(self.predicted - self.accepted).sum() / self.count.sum()) if self.count.any() else np.nan


def tried_and_hit(forest: Forest, accepted: IntArray) -> tuple[BoolArray, BoolArray]:
    """Return the nodes whose parent was committed, and the nodes that were committed.  -> two [num_nodes] bool

    Args:
        accepted: [num_accepted] int64, accepted nodes of the forest, without roots.
    """
    was_hit = np.zeros(len(forest.depths), dtype=np.bool_)
    was_hit[accepted] = True
    is_root = forest.depths == 0
    return (was_hit | is_root)[forest.parents] & ~is_root, was_hit
