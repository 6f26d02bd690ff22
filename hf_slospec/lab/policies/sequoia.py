"""Sequoia (arXiv 2402.12374): the optimal static tree for the measured acceptance, its size by step times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.calibration import Conditionals, path_products, tried_and_hit
from hf_slospec.algo.tree import FloatArray, Forest, IntArray
from hf_slospec.engine.protocols import Plan, PolicyStep, Selection
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.static_tree import trees_within
from hf_slospec.lab.policies.tree_shapes import Sequoia, StaticTree
from hf_slospec.policies.limits import max_useful_depth
from hf_slospec.policies.registry import NamedPolicy
from hf_slospec.policies.settings import PolicySettings

MAX_NODES = 64  # per tree
RESOLVE = 32  # steps between solutions for new acceptance rates
PRIOR = 0.6, 0.45  # acceptance rate of the first child, and of each further one given that those before were rejected
PRIOR_WEIGHT = 20.0  # weight of the prior per rank, in tried children
MEMORY = 400.0  # tried children per rank after which the oldest fade


class AcceptanceByRank:
    """Acceptance rates of children by rank, given that their parent was accepted; old steps fade.

    A child counts as tried if its earlier siblings were rejected, so the sum of the rates never exceeds 1.
    """

    def __init__(self, max_rank: int):
        self._tried = np.full(max_rank, PRIOR_WEIGHT)
        self._hits = PRIOR_WEIGHT * np.array([PRIOR[min(rank, 1)] for rank in range(max_rank)])

    @property
    def rates(self) -> FloatArray:
        """Acceptance rates by rank, [max_rank] f64 in (0, 1)."""
        accepted = self._hits / self._tried
        rejected_before = np.cumprod(np.concatenate(([1.0], 1.0 - accepted[:-1])))
        rates: FloatArray = accepted * rejected_before
        return rates

    def observe(self, forest: Forest, accepted: IntArray) -> None:
        """Learn from the draft trees of a step; ``accepted`` are nodes of the forest, [num_accepted] int64."""
        was_tried, was_hit = tried_and_hit(forest, accepted)
        ranks, max_rank = Conditionals.of(forest).ranks, len(self._tried)
        hit_below = np.full(len(ranks), max_rank)  # rank of the child that was accepted
        hit_below[forest.parents[accepted]] = ranks[accepted]
        was_tried &= ranks <= hit_below[forest.parents]
        for counts, nodes in ((self._tried, was_tried), (self._hits, was_hit)):
            counts += np.bincount(ranks[nodes], minlength=max_rank)
        fade = np.minimum(1.0, MEMORY / self._tried)
        self._tried *= fade
        self._hits *= fade


class SequoiaPolicy(NamedPolicy):
    """Policy that verifies one tree shape for all requests, chosen for every batch, or none if that is faster.

    Acceptance by rank is measured while decoding, starting from ``PRIOR``, and the trees are solved for again every
    ``RESOLVE`` steps. Step times are those of the whole batch; the paper considers a single request.
    """

    name = "sequoia"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.acceptance = AcceptanceByRank(config.max_width)
        self._num_steps = 0
        self._solve()

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        max_width = self.config.max_width  # the width of a tree is known only when it is solved for

        def seconds(num_nodes: IntArray, num_levels: IntArray) -> FloatArray:
            verify_s = self.costs.verify_s(num_requests * num_nodes + num_prefill_tokens, num_requests, num_keys)
            return verify_s + self.costs.draft_s(num_requests, num_levels - 1, max_width, num_keys)

        size = self._table.best_size(seconds, max_useful_depth(requests, self.config.max_depth) + 1)
        if size not in self._solved:
            self._solved[size] = self._table.tree(*size)
        shape = self._solved[size]
        step_s = float(seconds(*np.array(size)))
        candidates, _ = yield Plan(shape.max_depth, min(shape.max_width, max_width))
        trees = trees_within(shape, requests, candidates)
        forest = Forest.of(trees)  # smaller than the shape where candidates are missing or few tokens are left
        path_probs = path_products(forest, self._rates[Conditionals.of(forest).ranks])
        accepted, _ = yield Selection(trees, np.bincount(forest.tree_of, path_probs).tolist(), step_s)
        self.acceptance.observe(forest, forest.indices(accepted))
        self._num_steps += 1
        if self._num_steps % RESOLVE == 0:
            self._solve()

    def _solve(self) -> None:
        self._rates = self.acceptance.rates
        max_nodes = min(MAX_NODES, 1 + self.config.max_depth * self.config.max_width)
        self._table = Sequoia(self._rates, max_nodes, self.config.max_depth + 1)
        self._solved: dict[tuple[int, int], StaticTree] = {}  # by size: nodes and levels
