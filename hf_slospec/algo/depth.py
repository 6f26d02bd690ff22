"""Depth and width of drafting, depth 0 included: the shape with the highest recent expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_slospec.algo.tree import FloatArray, Forest, IntArray, places_in_groups

# draft levels [depths, 1], beam widths [widths], expected tokens and nodes per drafting request [depths, widths]
# -> seconds of such steps [depths, widths]
ShapeTime = Callable[[IntArray, IntArray, FloatArray, FloatArray], FloatArray]


def beam_ranks(forest: Forest) -> IntArray:
    """Return the place of every node among the nodes of its depth in its tree.  -> [num_nodes] int64"""
    order = np.lexsort((forest.depths, forest.tree_of))
    tree_of, depths = forest.tree_of[order], forest.depths[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (tree_of[1:] != tree_of[:-1]) | (depths[1:] != depths[:-1])
    return places_in_groups(order, is_first)


class DepthControl:
    """Running averages of the contribution of each place of a beam, and the best depth and width by these averages.

    Places that were not drafted keep their averages. While speculation is on, every ``EXPLORE_EVERY``-th step drafts
    the whole shape, so that all averages are renewed. While it is off, a probe drafts ``PROBE_DEPTH`` levels, and the
    interval between probes doubles up to ``MAX_INTERVAL`` steps, which bounds what probing costs.
    """

    EXPLORE_EVERY = 32  # steps
    WARMUP_STEPS = 3  # steps of the whole shape before the averages decide
    PROBE_DEPTH = 2  # levels of a probe while speculation is off
    BEYOND = 1  # levels deeper than the best depth that a step may draft if its tree is worth it
    MIN_INTERVAL, MAX_INTERVAL = 8, 128  # steps between probes while speculation is off
    MARGIN = 1.02  # factor by which speculation must be better than plain decoding to be switched on
    WEIGHT = 0.1  # of a step in the running averages, if the place was drafted in the step before, too
    MAX_WEIGHT = 0.5  # of a step in the running averages, if the place was not drafted for long

    def __init__(self, max_depth: int, max_width: int):
        self.nodes = np.zeros((max_depth + 1, max_width))  # [depth, place in beam] verified nodes per request
        self.mass = np.zeros((max_depth + 1, max_width))  # their path probability, which is their expected tokens
        self.nodes[0, 0] = self.mass[0, 0] = 1.0
        self.steps_since = np.full((max_depth + 1, max_width), np.inf)  # steps since the place was last drafted
        self.is_tried = np.zeros((max_depth + 1, max_width), dtype=np.bool_)  # places that a step would have drafted
        self.num_planned = self.num_observed = 0
        self.is_on = True
        self.goodput = 0.0  # expected tokens per second and request of the last shape chosen by averages
        self._steps_off, self._interval = 0, self.MIN_INTERVAL

    def observe(
        self,
        forest: Forest,
        path_probs: FloatArray,
        is_verified: np.ndarray,
        depth: int,
        width: int,
        num_drafting: int | None = None,
        planned_depth: int = 0,
    ) -> None:
        """Update the averages by one step.

        Args:
            forest: candidate trees.
            path_probs: [num_nodes] f64, calibrated path probabilities.
            is_verified: [num_nodes] bool, the nodes that were verified.
            depth, width: shape to which trees were drafted.
            num_drafting: number of trees that were drafted, the others being roots only; None: all.
            planned_depth: levels that the drafter might have drafted, had those beyond ``depth`` been worth their time.
        """
        self.num_observed += 1
        # Levels that were not worth drafting need no further look, or every step would take one until they are.
        self.is_tried[1 : max(depth, planned_depth) + 1, :width] = True
        usual = max(self.WEIGHT, 1.0 / self.num_observed)
        seen = np.s_[1 : depth + 1, :width]
        weights = np.minimum(1.0 - (1.0 - usual) ** self.steps_since[seen], max(usual, self.MAX_WEIGHT))
        weights[np.isinf(self.steps_since[seen])] = 1.0
        max_depth, max_width = self.nodes.shape[0] - 1, self.nodes.shape[1]
        at = np.minimum(forest.depths, max_depth) * max_width + np.minimum(beam_ranks(forest), max_width - 1)
        for average, values in ((self.nodes, is_verified), (self.mass, is_verified * path_probs)):
            now = np.bincount(at, values, minlength=average.size).reshape(average.shape) / (
                num_drafting or len(forest.trees)
            )
            average[seen] += weights * (now[seen] - average[seen])
        self.steps_since[seen] = 0

    def best(self, max_depth: int, max_width: int, seconds: ShapeTime) -> tuple[int, int]:
        """Return the depth and width to draft: those of most expected tokens per second, or a larger exploring shape.

        Args:
            max_depth, max_width: bounds of the shape.
            seconds: predicted step times by shape.
        """
        self.num_planned += 1
        self.steps_since += 1
        depth, width, best, plain = self.best_shape(max_depth, max_width, seconds)
        is_tried = bool(self.is_tried[1 : max_depth + 1, :max_width].all())
        if self.num_observed < self.WARMUP_STEPS or (self.is_on and not is_tried):
            self.goodput = max(best, plain)
            return max_depth, max_width
        self._switch(best, plain)
        if not self.is_on:
            self.goodput, self._steps_off = plain, self._steps_off + 1
            if self._steps_off < self._interval:
                return 0, 1
            self._steps_off, self._interval = 0, min(2 * self._interval, self.MAX_INTERVAL)
            return min(self.PROBE_DEPTH, max_depth), max_width
        self.goodput = best
        if self.num_planned % self.EXPLORE_EVERY == 0:
            return max_depth, max_width
        return min(depth + self.BEYOND, max_depth), width

    def _switch(self, best: float, plain: float) -> None:
        was_on, self.is_on = self.is_on, best > plain * (1.0 if self.is_on else self.MARGIN)
        if was_on and not self.is_on:
            self._steps_off = 0
        if self.is_on:
            self._interval = self.MIN_INTERVAL

    def best_shape(self, max_depth: int, max_width: int, seconds: ShapeTime) -> tuple[int, int, float, float]:
        """Find the best shape by the averages, without exploring.

        Returns:
            Depth, width, and expected tokens per second and request of the best shape that drafts; then the same rate
            of plain decoding.
        """
        depths, widths = np.arange(max_depth + 1)[:, None], np.arange(1, max_width + 1)
        tokens, nodes = (
            average[: max_depth + 1, :max_width].cumsum(1).cumsum(0) for average in (self.mass, self.nodes)
        )
        rates = tokens / seconds(depths, widths, tokens, nodes)
        plain = float(rates[0, 0])
        if not max_depth:
            return 0, 1, 0.0, plain
        at = int(np.argmax(rates[1:].T))  # of equal rates the narrowest shape, then the shallowest
        width, depth = divmod(at, max_depth)
        return depth + 1, width + 1, float(rates[depth + 1, width]), plain
