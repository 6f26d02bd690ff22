"""Whether drafting pays, and how deep: the depth whose expected tokens per second were highest lately."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import TokenTree


class DepthControl:
    """Running averages of what each depth contributes, and the best depth by them (goodput over depths, 0 included).

    Levels deeper than the last steps drafted keep their old averages; every ``EXPLORE_EVERY``-th step drafts
    at full depth, so that they are looked at again and speculation comes back when it pays. The longer a level was not
    looked at, the more a new look counts.
    """

    EXPLORE_EVERY = 16
    MIN_OBSERVED = 8  # steps at full depth before any conclusion
    WEIGHT = 0.1  # of a step in the running averages, if the level was looked at in the step before
    MAX_WEIGHT = 0.5  # of a step after a long time without

    def __init__(self, max_depth: int):
        self.nodes = np.zeros(max_depth + 1)  # [depth] verified nodes per request
        self.mass = np.zeros(max_depth + 1)  # [depth] their path probability, the tokens expected of them
        self.steps_since = np.full(max_depth + 1, np.inf)  # [depth] steps since the level was last looked at
        self.num_planned = self.num_observed = 0
        self.goodput = 0.0  # expected tokens per second of the last depth chosen by averages

    def observe(self, trees: Sequence[TokenTree], depth: int) -> None:
        """Take in the draft trees of a step that drafted ``depth`` levels."""
        depths = np.concatenate([tree.depths for tree in trees])
        path_probs = np.concatenate([tree.path_probs for tree in trees])
        levels = slice(depth + 1)
        self.num_observed += 1
        usual = max(self.WEIGHT, 1.0 / self.num_observed)
        weights = np.minimum(1.0 - (1.0 - usual) ** self.steps_since[levels], max(usual, self.MAX_WEIGHT))
        weights[np.isinf(self.steps_since[levels])] = 1.0
        for average, values in ((self.nodes, None), (self.mass, path_probs)):
            now = np.bincount(depths, values, minlength=depth + 1)[levels] / len(trees)
            average[levels] += weights * (now - average[levels])
        self.steps_since[levels] = 0

    def best(self, num_requests: int, max_depth: int, width: int, costs: StepCosts) -> int:
        """The depth with most expected tokens per second, or ``max_depth`` while exploring."""
        self.num_planned += 1
        self.steps_since += 1
        is_new = self.num_observed < self.MIN_OBSERVED or bool(np.isinf(self.steps_since[: max_depth + 1]).any())
        if is_new or self.num_planned % self.EXPLORE_EVERY == 0:
            return max_depth
        tokens = np.cumsum(self.mass[: max_depth + 1])
        verify_s = costs.verify(num_requests * np.cumsum(self.nodes[: max_depth + 1]))
        draft_s = np.array([costs.draft_s(num_requests, depth, width) for depth in range(max_depth + 1)])
        goodput = num_requests * tokens / (draft_s + verify_s)
        best = int(np.argmax(goodput))
        self.goodput = float(goodput[best])
        return best
