"""Path probabilities that predict what is committed, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Calibration, Conditionals, Reliability, path_products, shifted, tried_and_hit
from hf_slospec.algo.tree import BoolArray, FloatArray, Forest, IntArray

OWN_RATE, OVERALL_RATE = 0.12, 0.01  # how far one unexpected acceptance, or refusal, moves log-odds
MAX_SHIFT = 2.5


class Speculated(Protocol):
    """The request a tree belongs to; hashable."""

    @property
    def is_sampled(self) -> bool:
        """Whether the target draws its tokens; if not, it takes the most probable ones."""


@dataclass(frozen=True)
class Prediction:
    """What is expected of the candidates of a step."""

    forest: Forest
    is_sampled: BoolArray  # [num_nodes], of the node's request
    conditionals: Conditionals  # the draft's
    believed: FloatArray  # [num_nodes] f64, conditionals as calibrated
    path_probs: FloatArray  # [num_nodes] f64, their products along paths

    def expected_tokens(self, is_verified: BoolArray) -> FloatArray:
        """Tokens each request should commit with these candidates verified, roots included.  -> [num_requests] f64"""
        verified: FloatArray = self.path_probs * is_verified
        return np.bincount(self.forest.tree_of, verified).astype(np.float64)


class Acceptance:
    """The draft's conditionals, calibrated by all requests' outcomes and moved by each request's own.

    Calibrations, of sampled and of greedy requests, learn what draft probabilities are worth. On the scale of log-odds,
    one shift follows all requests' surprises and one each request's: some texts run hotter or colder than others. Books
    of prediction against outcome are kept: reliability before and after, by depth and by child rank.
    """

    def __init__(self, max_depth: int = 32, max_rank: int = 8) -> None:
        self.sampled, self.greedy = Calibration(), Calibration(Calibration.GREEDY_EXPONENT)
        self.overall = 0.0
        self.own: WeakKeyDictionary[Speculated, float] = WeakKeyDictionary()
        self.before, self.after = Reliability(), Reliability()
        # [depth] and [rank]: predicted acceptances, actual ones, children tried
        self.by_depth, self.by_rank = np.zeros((3, max_depth + 1)), np.zeros((3, max_rank))

    def predict(self, requests: Sequence[Speculated], forest: Forest) -> Prediction:
        """Of every candidate of these requests, one tree each."""
        conditionals = Conditionals.of(forest)
        is_sampled = np.array([request.is_sampled for request in requests])[forest.tree_of]
        shifts = np.array([self.own.get(request, 0.0) for request in requests]) + self.overall
        if is_sampled.all() or not is_sampled.any():
            calibrated = (self.sampled if is_sampled[0] else self.greedy)(conditionals)
        else:
            calibrated = np.where(is_sampled, self.sampled(conditionals), self.greedy(conditionals))
        believed = shifted(calibrated, shifts[forest.tree_of])
        return Prediction(forest, is_sampled, conditionals, believed, path_products(forest, believed))

    def observe(
        self,
        requests: Sequence[Speculated],
        prediction: Prediction,
        is_verified: BoolArray,
        accepted: IntArray,
    ) -> None:
        """Take in a step.

        Args:
            is_verified: [num_nodes] bool, the candidates that were verified.
            accepted: [num_accepted] int64, those that were committed, as nodes of the forest.
        """
        forest, believed = prediction.forest, prediction.believed
        was_tried, was_hit = tried_and_hit(forest, accepted)
        was_tried &= is_verified
        surprise = np.bincount(forest.tree_of, was_hit - believed * was_tried, minlength=len(requests))
        moved = np.array([self.own.get(request, 0.0) for request in requests]) + OWN_RATE * surprise
        self.own.update(zip(requests, np.clip(moved, -MAX_SHIFT, MAX_SHIFT).tolist(), strict=True))
        self.overall = float(np.clip(self.overall + OVERALL_RATE * surprise.sum(), -MAX_SHIFT, MAX_SHIFT))
        for calibration, is_own in ((self.sampled, prediction.is_sampled), (self.greedy, ~prediction.is_sampled)):
            if is_own.any():
                calibration.observe(prediction.conditionals, was_tried & is_own, was_hit)

        tried_believed, hits = believed[was_tried], was_hit[was_tried].astype(np.float64)
        self.before.observe(prediction.conditionals.probs[was_tried], hits)
        self.after.observe(tried_believed, hits)
        for books, at in ((self.by_depth, forest.depths), (self.by_rank, prediction.conditionals.ranks)):
            places = np.minimum(at[was_tried], books.shape[1] - 1)
            for row, values in zip(books, (tried_believed, hits, None), strict=True):
                row += np.bincount(places, values, minlength=len(row))
