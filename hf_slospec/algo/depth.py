"""How deep and wide to draft, 0 included: the shape whose expected tokens per second were highest lately."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_slospec.algo.tree import FloatArray, Forest, IntArray, places_in_groups

# draft levels [depths, 1], beam widths [widths], nodes per drafting request [depths, widths]
# -> seconds of such steps [depths, widths]
ShapeTime = Callable[[IntArray, IntArray, FloatArray], FloatArray]


def beam_ranks(forest: Forest) -> IntArray:
    """Place of every node among those of its depth in its tree.  -> [num_nodes] int64"""
    order = np.lexsort((forest.depths, forest.tree_of))
    tree_of, depths = forest.tree_of[order], forest.depths[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (tree_of[1:] != tree_of[:-1]) | (depths[1:] != depths[:-1])
    return places_in_groups(order, is_first)


class DepthControl:
    """Running averages of what each place of a beam contributes, and the best depth and width by them.

    What the last steps did not draft keeps its old averages. While speculation is on, every ``EXPLORE_EVERY``-th step
    drafts the whole shape, so that all is looked at again. While it is off, a look is ``LOOK`` levels deep, and the
    longer it stays off, the rarer looks become: an exploring step costs, so their number is bounded.
    """

    EXPLORE_EVERY = 32
    FIRST_LOOKS = 3  # steps of the whole shape before any conclusion
    LOOK = 2  # levels of a look while off
    BEYOND = 1  # levels deeper than the best depth that a step may draft if its tree is worth it
    SHORTEST, LONGEST = 8, 128  # steps between looks while off
    MARGIN = 1.02  # speculation must promise this much more than none to be switched on
    WEIGHT = 0.1  # of a step in the running averages, if the place was looked at in the step before
    MAX_WEIGHT = 0.5  # of a step after a long time without

    def __init__(self, max_depth: int, max_width: int):
        self.nodes = np.zeros((max_depth + 1, max_width))  # [depth, place in beam] verified nodes per request
        self.mass = np.zeros((max_depth + 1, max_width))  # their path probability, the tokens expected of them
        self.nodes[0, 0] = self.mass[0, 0] = 1.0
        self.steps_since = np.full((max_depth + 1, max_width), np.inf)  # since the place was last looked at
        self.num_planned = self.num_observed = 0
        self.is_on = True
        self.goodput = 0.0  # expected tokens per second and request, of the last shape chosen by averages
        self._steps_off, self._interval = 0, self.SHORTEST

    def observe(
        self,
        forest: Forest,
        path_probs: FloatArray,
        is_verified: np.ndarray,
        depth: int,
        width: int,
        num_drafting: int | None = None,
    ) -> None:
        """Take in which candidates of a step were verified, and with what path probabilities.  [num_nodes] each

        ``num_drafting``: trees that were drafted to this depth and width, the others being roots; None: all.
        """
        self.num_observed += 1
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
        """Depth and width with most expected tokens per second; while exploring, more than that."""
        self.num_planned += 1
        self.steps_since += 1
        depth, width, best, plain = self.best_shape(max_depth, max_width, seconds)
        unseen = bool(np.isinf(self.steps_since[1 : max_depth + 1, :max_width]).any())
        if self.num_observed < self.FIRST_LOOKS or (self.is_on and unseen):
            self.goodput = max(best, plain)
            return max_depth, max_width
        self._switch(best, plain)
        if not self.is_on:
            self.goodput, self._steps_off = plain, self._steps_off + 1
            if self._steps_off < self._interval:
                return 0, 1
            self._steps_off, self._interval = 0, min(2 * self._interval, self.LONGEST)
            return min(self.LOOK, max_depth), max_width
        self.goodput = best
        if self.num_planned % self.EXPLORE_EVERY == 0:
            return max_depth, max_width
        return min(depth + self.BEYOND, max_depth), width

    def _switch(self, best: float, plain: float) -> None:
        was_on, self.is_on = self.is_on, best > plain * (1.0 if self.is_on else self.MARGIN)
        if was_on and not self.is_on:
            self._steps_off = 0
        if self.is_on:
            self._interval = self.SHORTEST

    def best_shape(self, max_depth: int, max_width: int, seconds: ShapeTime) -> tuple[int, int, float, float]:
        """-> depth, width and tokens per second and request of the best shape with drafting, and of none"""
        depths, widths = np.arange(max_depth + 1)[:, None], np.arange(1, max_width + 1)
        tokens, nodes = (
            average[: max_depth + 1, :max_width].cumsum(1).cumsum(0) for average in (self.mass, self.nodes)
        )
        rates = tokens / seconds(depths, widths, nodes)
        plain = float(rates[0, 0])
        if not max_depth:
            return 0, 1, 0.0, plain
        at = int(np.argmax(rates[1:].T))  # of equal ones the narrowest, then the shallowest
        width, depth = divmod(at, max_depth)
        return depth + 1, width + 1, float(rates[depth + 1, width]), plain
