"""Sequoia (arXiv 2402.12374): the static tree that is best for what was accepted so far, its size by step times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.calibration import Conditionals, path_products, tried_and_hit
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import FloatArray, Forest, IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.fixed import StaticTreePolicy
from hf_slospec.policies.papers.adaserve import useful_depth
from hf_slospec.policies.papers.tree_shapes import Sequoia, StaticTree

MAX_NODES = 64  # of a tree
RESOLVE = 32  # steps between solutions for new acceptance rates
PRIOR = 0.6, 0.45  # believed of the first child, and of each further one where those before it were refused
PRIOR_WEIGHT = 20.0  # children tried, per rank, that this counts as
MEMORY = 400.0  # children tried, per rank, after which the oldest fade


class AcceptanceByRank:
    """How often the child of each rank was accepted once its parent was; steps long ago fade.

    Counted among those whose earlier siblings were refused, so that all ranks together never exceed 1.
    """

    def __init__(self, max_rank: int):
        self._tried = np.full(max_rank, PRIOR_WEIGHT)
        self._hits = PRIOR_WEIGHT * np.array([PRIOR[min(rank, 1)] for rank in range(max_rank)])

    @property
    def rates(self) -> FloatArray:
        """[max_rank], in (0, 1)"""
        accepted = self._hits / self._tried
        refused_before = np.cumprod(np.concatenate(([1.0], 1.0 - accepted[:-1])))
        rates: FloatArray = accepted * refused_before
        return rates

    def observe(self, forest: Forest, accepted: IntArray) -> None:
        """Take in verified trees, and which of their nodes were committed.  [num_accepted], of the forest"""
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


class SequoiaPolicy(StaticTreePolicy):
    """One tree for all requests, chosen anew for every batch, and none at all where that is faster.

    Acceptance by rank is measured while decoding, from a documented prior on, and the trees are solved for again now
    and then. The step times are those of the whole batch, which the paper, for one request, has no need of.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        super().__init__(config.max_depth)
        self.config, self.costs = config, costs
        self.acceptance = AcceptanceByRank(config.max_width)
        self._num_steps = 0
        self._solve()

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)
        max_width = self.config.max_width  # a tree's own is known when it is solved for

        def seconds(num_nodes: IntArray, num_levels: IntArray) -> FloatArray:
            verify_s = self.costs.verify_s(num_requests * num_nodes + num_prefill_tokens, num_requests, num_keys)
            return verify_s + self.costs.draft_s(num_requests, num_levels - 1, max_width, num_keys)

        size = self._table.best_size(seconds, useful_depth(requests, self.config.max_depth) + 1)
        if size not in self._solved:
            self._solved[size] = self._table.tree(*size)
        self.static = self._solved[size]
        self._step_s = float(seconds(*np.array(size)))
        return Plan(self.static.max_depth, min(self.static.max_width, max_width))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = super().select(requests, candidates, plan).trees
        self._forest = Forest.of(trees)  # smaller than the shape where candidates or tokens left are
        path_probs = path_products(self._forest, self._rates[Conditionals.of(self._forest).ranks])
        return Selection(trees, np.bincount(self._forest.tree_of, path_probs).tolist(), self._step_s)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        self.acceptance.observe(self._forest, self._forest.indices(accepted))
        self._num_steps += 1
        if self._num_steps % RESOLVE == 0:
            self._solve()

    def _solve(self) -> None:
        self._rates = self.acceptance.rates
        max_nodes = min(MAX_NODES, 1 + self.config.max_depth * self.config.max_width)
        self._table = Sequoia(self._rates, max_nodes, self.config.max_depth + 1)
        self._solved: dict[tuple[int, int], StaticTree] = {}
