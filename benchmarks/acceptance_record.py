"""Predicted and actual acceptance of drafted nodes, recorded while a policy learns from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_slospec.engine.acceptance import Acceptance, Prediction, tried_and_hit
from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray

NUM_BINS = 10


class AcceptanceRecord:
    """Outcomes of all children whose parent was committed, from the steps that ``acceptance``
    observes from now on.
    """

    def __init__(self, acceptance: Acceptance):
        self._steps = list[list[Any]]()
        self._learn = acceptance.observe
        acceptance.observe = self._observe  # type: ignore[method-assign]

    def _observe(
        self, requests: Any, prediction: Prediction, is_verified: BoolArray, accepted: IntArray
    ) -> None:
        was_tried, was_hit = tried_and_hit(prediction.forest, accepted)
        was_tried &= is_verified
        conditionals = prediction.conditionals
        depths = prediction.forest.depths
        columns = (conditionals.probs, prediction.calibrated, was_hit, depths, conditionals.ranks)
        self._steps.append([column[was_tried] for column in columns])
        self._learn(requests, prediction, is_verified, accepted)

    def figures(self, max_depth: int, max_rank: int = 8) -> dict[str, Any]:
        """Return scores before and after calibration, and sums by depth and by child rank.

        Sums are predicted acceptances, actual acceptances and tried children; deeper nodes and
        higher ranks count as the last ones.
        """
        probs, calibrated, hits, depths, ranks = map(np.concatenate, zip(*self._steps, strict=True))
        return {
            "before": reliability(probs, hits),
            "after": reliability(calibrated, hits),
            "by_depth": _sums(depths, max_depth + 1, calibrated, hits).round(2).tolist(),
            "by_rank": _sums(ranks, max_rank, calibrated, hits).round(2).tolist(),
        }


def reliability(predicted: FloatArray, was_hit: BoolArray) -> dict[str, Any]:
    """Return the Brier score, the expected calibration error and the sums of each bin of
    probabilities, as in a reliability diagram.
    """
    sums = _sums((predicted * NUM_BINS).astype(np.int64), NUM_BINS, predicted, was_hit)
    return {
        "brier": float(((predicted - was_hit) ** 2).mean()),
        "ece": float(np.abs(sums[0] - sums[1]).sum() / len(predicted)),
        "bins": sums.round(2).tolist(),
    }


def _sums(indices: IntArray, size: int, predicted: FloatArray, was_hit: BoolArray) -> FloatArray:
    """Return sums of predicted and actual acceptances and of children.  -> [3, size] f64"""
    places = np.minimum(indices, size - 1)
    columns = (predicted, was_hit, None)
    return np.stack([np.bincount(places, values, minlength=size) for values in columns])
