"""Choice of draft depth and beam width for the ``auto`` policy: the shape with the most expected
tokens per second, or plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_slospec.tree.tree import FloatArray, Forest, IntArray, ranks_by_key

# Predicts the seconds of steps by shape: draft levels [depths, 1], beam widths [widths], and per
# drafting request expected tokens [estimates, depths, widths] and nodes [depths, widths] ->
# seconds, broadcast to [estimates, depths, widths].
ShapeTime = Callable[[IntArray, IntArray, FloatArray, FloatArray], FloatArray]
# draft levels, beam width -> seconds that a look adds to a plain step
ProbeTime = Callable[[int, int], float]


def beam_ranks(forest: Forest) -> IntArray:
    """Return the rank of every node among the nodes of equal depth in its tree.  -> [num_nodes]
    int64
    """
    return ranks_by_key(forest.tree_of * (forest.depths.max() + 1) + forest.depths)


@dataclass(frozen=True)
class Drafted:
    """Shape and number of the trees that a step drafted."""

    depth: int  # planned levels; those behind an early stop count as drafted without nodes
    width: int
    num_trees: int  # trees with drafts; the other requests of the step have only a root


class _Choice(NamedTuple):
    """The shape that is best by the averages, and the conditions under which it was chosen."""

    num_trees: int  # trees observed
    max_depth: int
    max_width: int
    num_requests: int
    depth: int  # 0: speculation is off
    width: int
    # False: the averages do not cover all depths and widths yet, so the next step drafts at maximum
    # depth and width
    is_known: bool
    step_s: float
    # seconds that a step at maximum depth and width, and a plain step, cost beyond what the best
    # shape needs for the same tokens
    look_s: float
    plain_look_s: float


class Looks:
    """Decides when looks of one kind are due, so that they take a bounded share of the time.

    A look is due once the time saved for looks covers what it is predicted to cost, and at gaps
    that are given, since the predicted cost may be wrong as well.
    """

    MIN_GAP = 8  # minimum steps between looks; also the first of doubling gaps

    def __init__(self, share: float, gap: float = math.inf, growth: float = math.inf):
        """Start without a look.

        Args:
            share: share of the engine's time that looks may add.
            gap: number of steps after which the first look is due at any cost.
            growth: ratio of each such gap to the one before it.
        """
        self._share = share
        self._gap = gap
        self._growth = growth
        self._num_steps = 0  # since the last look
        self._saved_s = 0.0  # seconds that a look may cost now

    def is_due(self, step_s: float, look_s: Callable[[], float]) -> bool:
        """Count a step of ``step_s`` seconds; return whether a look, which adds ``look_s()``
        seconds, is due.
        """
        self._num_steps += 1
        self._saved_s += self._share * step_s
        is_early = self._num_steps >= self._gap
        if not is_early and (self._num_steps < self.MIN_GAP or self._saved_s < look_s()):
            return False
        self.taken()
        return True

    def taken(self) -> None:
        """Begin the next gap, as a look was taken or a step was as good as one."""
        self._num_steps = 0
        self._saved_s = 0.0
        self._gap *= self._growth


class DepthControl:
    """Chooses depth and beam width by running averages of what each beam rank contributes at each
    depth.

    The average of a (depth, rank) stays as it is in steps that do not draft it. *Looks* are steps
    that renew what others do not: while speculation is on, some draft at maximum depth and width,
    and others are plain, since without them a profile that understates how much faster a plain step
    is would never be found wrong; while it is off, they draft ``PROBE_DEPTH`` levels for a few
    requests. What looks of each kind cost is bounded, see :class:`Looks`.

    A choice stands for ``STANDS`` steps if the number of requests is similar, since choosing takes
    longer than all other decisions of a step with few requests; while few trees were observed, it
    is renewed when a quarter more were. A shape then yields only to one that is better by
    more than ``KEPT``."""

    STANDS = 16  # steps for which a choice stands
    SIMILAR = 1.5  # largest ratio between numbers of requests for which a choice stands
    GROWTH = 1.25  # ratio between numbers of observed trees for which a choice is renewed
    KEPT = 0.005  # relative loss against the best shape at which the shape in use is kept
    # share of the engine's time that looks may add: those that draft, and plain ones
    LOOK_SHARE = 0.01
    PLAIN_SHARE = 0.005
    # Steps or trees drafted at maximum depth and width before the averages decide, whichever comes
    # first
    WARMUP_STEPS = 3
    WARMUP_TREES = 24
    PROBE_DEPTH = 2  # levels of a look while speculation is off
    MIN_CONTINUATION = 0.2  # lower bound of the result of `continuation`
    BEYOND = 1  # levels beyond the best depth that a step may draft if its trees are worth it
    # factor by which speculation must be faster than plain decoding to be switched on
    MARGIN = 1.02
    WEIGHT = 0.1  # weight of a step in an average that the step before updated as well
    MAX_WEIGHT = 0.5  # maximum weight of a step in an average that was not updated for long
    DOUBT = 0.5  # upper bound of the standard deviation of a node's contribution in one step
    NO_DOUBT = 0.02  # relative standard error of an average below which it counts as exact
    # observed trees from which on all averages count as exact
    FEW_TREES = round((DOUBT / NO_DOUBT) ** 2)

    def __init__(self, max_depth: int, max_width: int):
        # [depth, rank in beam]: verified nodes per request
        self.nodes = np.zeros((max_depth + 1, max_width))
        # [depth, rank in beam]: weighted path probability of verified nodes, i.e. expected tokens
        self.mass = np.zeros((max_depth + 1, max_width))
        self.nodes[0, 0] = self.mass[0, 0] = 1.0
        # [depth, rank in beam]: steps since such a node was last drafted; inf: never
        self.steps_since = np.full((max_depth + 1, max_width), np.inf)
        self.num_observed = self.num_trees = 0  # steps that drafted, and their trees
        self.is_on = True
        # expected tokens per second and request of the last shape chosen by the averages
        self.goodput = 0.0
        # looks at whole shapes and at plain steps while speculation is on, and at drafts while it
        # is off; before the first plain look, nothing may be known of plain steps
        self._shape_looks = Looks(self.LOOK_SHARE)
        self.plain_looks = Looks(self.PLAIN_SHARE, gap=1)
        self._probes = Looks(self.LOOK_SHARE, Looks.MIN_GAP, 2.0)
        # The shape returned last is a look, whose outcome should be learned from at once
        self.is_look = True
        self.num_choices = 0  # made so far; what depends on slow averages is renewed with each
        self._shape = 1, 1  # best depth and width by the choice in use
        # the choice in use, and the number of steps since it was made
        self._choice = _Choice(0, 0, 0, 0, 0, 1, False, 0.0, 0.0, 0.0)
        self._age = 0

    def observe(
        self,
        forest: Forest,
        path_probs: FloatArray,
        is_verified: np.ndarray,
        drafted: Sequence[Drafted],
    ) -> None:
        """Update the averages by one step, or by several steps whose trees are given together.

        Args:
            forest: candidate trees.
            path_probs: [num_nodes] f64, calibrated path probabilities, multiplied by the weights of
                their trees, whose mean is 1.
            is_verified: [num_nodes] bool, the nodes that were verified.
            drafted: shape and number of trees of each step.
        """
        max_depth = self.nodes.shape[0] - 1
        max_width = self.nodes.shape[1]
        # [depth, rank in beam]: trees for which such a node was drafted
        num_trees = np.zeros(self.nodes.shape)
        for step in drafted:
            num_trees[1 : step.depth + 1, : step.width] += step.num_trees
            self.num_trees += step.num_trees
        self.num_observed += len(drafted)
        weight = max(self.WEIGHT, 1.0 / self.num_observed)
        is_drafted = num_trees > 0
        weights = np.minimum(
            1.0 - (1.0 - weight) ** self.steps_since[is_drafted], max(weight, self.MAX_WEIGHT)
        )
        weights[np.isinf(self.steps_since[is_drafted])] = 1.0
        entries = np.minimum(forest.depths, max_depth) * max_width + np.minimum(
            beam_ranks(forest), max_width - 1
        )
        for average, values in ((self.nodes, is_verified), (self.mass, is_verified * path_probs)):
            sums = np.bincount(entries, values, minlength=average.size).reshape(average.shape)
            average[is_drafted] += weights * (
                sums[is_drafted] / num_trees[is_drafted] - average[is_drafted]
            )
        self.steps_since[is_drafted] = 0

    def best(
        self,
        max_depth: int,
        max_width: int,
        num_requests: int,
        seconds: ShapeTime,
        probe_s: ProbeTime,
    ) -> tuple[int, int]:
        """Return the depth and width to draft in the next step: the shape with the most expected
        tokens per second, or the shape of a look if one is due.

        Args:
            max_depth, max_width: bounds of the shape.
            num_requests: decoding requests.
            seconds: predicted step times by shape.
            probe_s: predicted seconds that a look adds to plain decoding, by depth and width.
        """
        self.is_look = False
        if not max_depth:  # speculation is impossible in this step, but is not switched off
            return 0, 1
        self.steps_since += 1
        self._age += 1
        choice = self._choice
        ratio = num_requests / max(choice.num_requests, 1)
        stands = (
            choice.is_known
            and self._age < self.STANDS
            and 1.0 / self.SIMILAR < ratio < self.SIMILAR
            and max_depth <= choice.max_depth
            and max_width <= choice.max_width
            and min(self.num_trees, self.FEW_TREES) < self.GROWTH * choice.num_trees
        )
        if not stands:
            choice = self._choice = self._chosen(max_depth, max_width, num_requests, seconds)
            self._age = 0
            self.num_choices += 1
        probe_depth = min(self.PROBE_DEPTH, max_depth)
        if not choice.is_known:
            self.is_look = True
            return max_depth, max_width
        if not self.is_on:
            self.is_look = self._probes.is_due(
                choice.step_s, lambda: probe_s(probe_depth, max_width)
            )
            return (probe_depth, max_width) if self.is_look else (0, 1)
        if self._shape_looks.is_due(choice.step_s, lambda: choice.look_s):
            self.is_look = True
            return max_depth, max_width
        if self.plain_looks.is_due(choice.step_s, lambda: choice.plain_look_s):
            self._age = self.STANDS  # what the step took may change the choice
            return 0, 1
        return min(choice.depth, max_depth), min(choice.width, max_width)

    def _chosen(
        self, max_depth: int, max_width: int, num_requests: int, seconds: ShapeTime
    ) -> _Choice:
        tokens, step_s = self._expected(max_depth, max_width, seconds)
        kept = self._shape if self._choice.is_known and self.is_on else None
        depth, width, best, plain = self._best_of(tokens / step_s, kept)
        self._shape = depth, width
        is_warm = self.num_observed >= self.WARMUP_STEPS or self.num_trees >= self.WARMUP_TREES
        is_tried = bool(np.isfinite(self.steps_since[1 : max_depth + 1, :max_width]).all())
        is_known = is_warm and (is_tried or not self.is_on)
        if is_known:
            was_on = self.is_on
            self.is_on = best > plain * (1.0 if was_on else self.MARGIN)
            if was_on and not self.is_on:
                self._probes = Looks(self.LOOK_SHARE, Looks.MIN_GAP, 2.0)
            elif self.is_on and not was_on:
                self.plain_looks = Looks(self.PLAIN_SHARE)
        self.goodput = max(best, plain) if not is_known else best if self.is_on else plain
        made_for = min(self.num_trees, self.FEW_TREES), max_depth, max_width, num_requests
        if not self.is_on:
            return _Choice(*made_for, 0, 1, is_known, 1.0 / plain, 0.0, 0.0)
        # A look yields tokens, too; the time that the best shape needs for them is no loss.
        look_s, plain_look_s = (
            float(step_s[0, *shape] - tokens[0, *shape] / best) for shape in ((-1, -1), (0, 0))
        )
        best_s = float(step_s[0, depth, width - 1])
        deepest = min(depth + self.BEYOND, max_depth)
        return _Choice(*made_for, deepest, width, is_known, best_s, look_s, plain_look_s)

    def continuation(self, width: int) -> float:
        """Return the estimated probability that a path of the beam continues in the next level,
        which is its average at the first level.
        """
        return min(max(float(self.mass[1:2, :width].sum()), self.MIN_CONTINUATION), 1.0)

    def best_shape(
        self, max_depth: int, max_width: int, seconds: ShapeTime
    ) -> tuple[int, int, float, float]:
        """Find the best shape by the averages, whether or not a look is due.

        While few trees were observed, it is the shape with the smallest worst-case loss against the
        best one, if all averages are one standard error too low or all too high.

        Returns:
            Depth, width, and expected tokens per second and request of the best shape that drafts;
            then the expected tokens per second and request of plain decoding.
        """
        tokens, step_s = self._expected(max_depth, max_width, seconds)
        return self._best_of(tokens / step_s)

    def _best_of(
        self, rates: FloatArray, kept: tuple[int, int] | None = None
    ) -> tuple[int, int, float, float]:
        """Find the best shape, given tokens per second [estimates, depths, widths]; see
        :meth:`best_shape`. The depth and width ``kept`` are preferred if little is lost by them.
        """
        plain = float(rates[0, 0, 0])
        max_depth = rates.shape[1] - 1
        if not max_depth:
            return 0, 1, 0.0, plain
        losses = (1.0 - rates / rates.max((1, 2), keepdims=True))[-2:].max(axis=0)
        width, depth = divmod(
            int(np.argmin(losses[1:].T)), max_depth
        )  # ties: the narrowest shape, then the shallowest
        depth, width = depth + 1, width + 1
        if kept is not None and kept[0] <= max_depth and kept[1] <= rates.shape[2]:
            lost = losses[kept[0], kept[1] - 1] - losses[depth, width - 1]
            depth, width = kept if lost <= self.KEPT else (depth, width)
        return depth, width, float(rates[0, depth, width - 1]), plain

    def _expected(
        self, max_depth: int, max_width: int, seconds: ShapeTime
    ) -> tuple[FloatArray, FloatArray]:
        """Return the expected tokens per drafting request, and the predicted seconds of a step, by
        shape.

        Returns:
            Both [estimates, depths, widths] f64. The first estimate uses the averages. While few
            trees were observed, a low and a high estimate follow, with every acceptance probability
            one standard error lower or higher.
        """
        depths = np.arange(max_depth + 1)[:, None]
        widths = np.arange(1, max_width + 1)
        mass, nodes = (average[: max_depth + 1, :max_width] for average in (self.mass, self.nodes))
        doubt = self.DOUBT / max(self.num_trees, 1) ** 0.5
        errors = np.array([0.0, -min(doubt, 1.0), doubt] if doubt > self.NO_DOUBT else [0.0])[
            :, None, None
        ]
        tokens = np.minimum(mass * (1.0 + errors) ** depths, 1.0).cumsum(2).cumsum(1)
        return tokens, np.broadcast_to(
            seconds(depths, widths, tokens, nodes.cumsum(1).cumsum(0)), tokens.shape
        )
