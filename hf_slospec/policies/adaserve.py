"""Policy of the AdaServe paper (arXiv 2501.12162): depth and width by its equations 8 and 9, nodes
by its Algorithm 2, and a fixed token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.fixed import selection_of
from hf_slospec.policies.registry import (
    NamedPolicy,
    PolicyOptions,
    max_useful_depth,
    roofline_tokens,
    without_useless_nodes,
)
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import FloatArray, Forest, IntArray, TokenTree

SLOOrder = Literal["ascending", "descending"]


def required_tokens(
    elapsed_s: float, emitted: int, step_time_s: float, pace_s: float | None
) -> float:
    """Return A(r), the tokens that this step must commit to meet the TPOT SLO on average (AdaServe,
    constraint 3).

    ``elapsed_s`` and ``emitted`` count from the first token on. If the result is at most 1, the
    root alone suffices. It is 0 if there is no TPOT SLO (``pace_s`` is None).
    """
    return 0.0 if pace_s is None else (elapsed_s + step_time_s) / pace_s - emitted


def adaptive_shape(
    num_requests: int,
    verify_tokens: int,
    draft_tokens: int,
    max_depth: int,
    max_width: int,
    depth_offset: int = 0,
    width_offset: int = 0,
    min_depth: int = 0,
) -> tuple[int, int]:
    """Return depth and beam width for this many requests (AdaServe, equations 8 and 9).

    [FIX] With D_min = 0 speculation stops when the roots alone fill the verification budget; with
    the paper's D_min >= 3 it never does.

    Args:
        num_requests: n, requests that decode in the step.
        verify_tokens: B1, nodes that the target verifies per step at most, roots included.
        draft_tokens: B2, tokens that the draft forwards per level at most.
        max_depth, max_width: D_max and W_max.
        depth_offset, width_offset: c1 and c2.
        min_depth: D_min.
    """
    depth = verify_tokens // (num_requests + depth_offset) - 1
    width = draft_tokens // num_requests + width_offset
    return min(max(depth, min_depth), max_depth), min(max(width, 1), max_width)


def count_until(needed: float, path_probs: FloatArray, at_most: int) -> int:
    """Return how many of ``path_probs`` are needed for 1 + their sum to reach ``needed``; all if
    they do not suffice.

    Args:
        needed: expected tokens, the root's bonus token included.
        path_probs: [n] f64, descending.
        at_most: maximum number of path probabilities to use.
    """
    path_probs = path_probs[:at_most]
    return min(int(np.searchsorted(expected_tokens(path_probs), needed)), len(path_probs))


def expected_tokens(path_probs: FloatArray) -> FloatArray:
    """Return the expected tokens if the root and its first 0, 1, 2, ... nodes are verified.  ->
    [len(path_probs) + 1] f64
    """
    return np.cumsum(np.concatenate(([1.0], path_probs)))


def select_nodes(
    trees: Sequence[TokenTree],
    required: Sequence[float],
    budget: int,
    *,
    max_slo_nodes: int,
    order: SLOOrder = "ascending",
) -> list[IntArray]:
    """Select the nodes that TPOT SLOs need first, then the globally best nodes (AdaServe, Algorithm
    2).

    Args:
        trees: one candidate tree per request.
        required: A(r) per request, see :func:`required_tokens`.
        budget: maximum number of verified nodes, roots included; roots are always verified.
        max_slo_nodes: n_max, nodes that the SLO phase may add to one request.
        order: order of the requests in the SLO phase. Ascending A(r) meets more TPOT SLOs when the
            budget is short.

    Returns:
        Per request the selected nodes, root first; each set is parent-closed.
    """
    forest = Forest.of(trees)
    ranked = forest.canonical(forest.path_probs)
    tree_of = forest.tree_of[ranked]
    path_probs = forest.path_probs[ranked]
    left = max(budget - len(trees), 0)
    is_taken = np.zeros(len(ranked), dtype=np.bool_)

    for request in sorted(
        range(len(trees)), key=lambda i: required[i], reverse=order == "descending"
    ):
        indices = np.flatnonzero(tree_of == request)
        # [FIX] ``needed`` is capped, since no tree can commit more than depth + 1 tokens; path
        # probabilities are summed, not conditional ones
        needed = min(required[request], trees[request].max_depth + 1)
        count = count_until(needed, path_probs[indices], min(max_slo_nodes, left))
        is_taken[indices[:count]] = True
        left -= count

    is_taken[np.flatnonzero(~is_taken)[:left]] = True
    return forest.nodes(ranked[is_taken])


class AdaServeOptions(PolicyOptions):
    """Settings that only the policy ``adaserve`` has."""

    depth_offset: int = Field(
        0, ge=0, description="c1 of AdaServe's equation 8: larger means shallower trees."
    )
    width_offset: int = Field(
        0, description="c2 of AdaServe's equation 9: larger means wider trees."
    )
    min_depth: int = Field(
        0,
        ge=0,
        description="D_min of AdaServe's equation 8. The paper's systems have 3 and 4, and never stop drafting.",
    )
    slo_order: SLOOrder = Field(
        "ascending",
        description="Order of the requests in the SLO phase, by the tokens they require.",
    )
    max_slo_share: float = Field(
        1.2,
        gt=0,
        description="n_max as a multiple of an even share of the budget: the SLO phase's limit per request.",
    )


class AdaServePolicy(NamedPolicy):
    """Policy that selects nodes for TPOT SLOs first, and spends the whole token budget on every
    step.

    As in the paper, the drafter's probabilities are not calibrated. Step times come from the cost
    model, which is corrected by measured steps; the paper's artifact adds 5 % to constant step
    times. If ``token_budget`` is not set, B is the ridge of the measured roofline; the artifact has
    512 for Llama-70B on four A100, and 256 for Qwen-32B."""

    name = "adaserve"
    options: ClassVar[type[PolicyOptions]] = AdaServeOptions

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.settings = config.options_of(AdaServeOptions)
        self.budget = config.token_budget or roofline_tokens(costs)

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        self._begun_s = begun_s
        return Plan(*self._shape(requests))

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        candidates = without_useless_nodes(requests, candidates)
        step_s = self._step_s(requests, plan)
        required = [
            required_tokens(*request.decoded(self._begun_s), step_s, request.pace_s)
            for request in requests
        ]
        nodes = self._nodes(requests, candidates, required)
        return selection_of(
            [tree.subtree(chosen) for tree, chosen in zip(candidates, nodes, strict=True)], step_s
        )

    def _step_s(self, requests: Sequence[Request], plan: Plan) -> float:
        return float(self.costs.shape_s(requests, plan.depth, plan.width, self.budget))

    def _shape(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return the depth and the width of candidate trees."""
        return adaptive_shape(
            len(requests),
            self.budget,
            self.config.draft_budget,
            max_useful_depth(requests, self.config.max_depth),
            self.config.max_width,
            self.settings.depth_offset,
            self.settings.width_offset,
            self.settings.min_depth,
        )

    def _nodes(
        self,
        requests: Sequence[Request],
        candidates: Sequence[TokenTree],
        required: Sequence[float],
    ) -> list[IntArray]:
        """Return the nodes to verify of each candidate tree, given the tokens that each request
        requires.
        """
        return select_nodes(
            candidates,
            required,
            self.budget,
            max_slo_nodes=int(self.settings.max_slo_share * self.budget / len(requests)),
            order=self.settings.slo_order,
        )
