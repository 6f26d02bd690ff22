"""Sequoia's policy, in one scenario or two."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.policies.sequoia import RESOLVE, AcceptanceByRank, SequoiaPolicy
from tests.support.policy_costs import EIGHT, NO_TIME, begun, costs, plan_of, requests_of
from tests.support.toys.trees import fan, grow


def test_acceptance_by_rank_is_measured_from_a_prior_on():
    acceptance = AcceptanceByRank(3)
    assert acceptance.rates.tolist() == pytest.approx([0.6, 0.18, 0.099])
    rng = np.random.default_rng(0)
    actual = np.array([0.5, 0.3, 0.1])
    policy = SequoiaPolicy(SLOSpecConfig(max_depth=1, max_width=3), costs(0.0, 0.0))
    [request] = requests_of(1)
    measured = []
    for _ in range(2000):
        step, plan = begun(policy, [request])
        step.select([fan(0.6, 0.3, 0.1)], plan)
        node = 1 + int(np.searchsorted(np.cumsum(actual), rng.random()))
        step.observe([[node] if node <= 3 else []], NO_TIME)
        measured.append(policy.acceptance.rates)
    assert np.mean(measured[500:], axis=0) == pytest.approx(actual, abs=0.03)


def test_sequoia_makes_trees_that_suit_draft_and_batch():
    """Candidates of three children per node, of which the target always takes the one of this rank."""
    parents = [0, 0, 0, *np.repeat(np.arange(1, 22, 3), 3).tolist()]
    beam = grow(parents, [0.5, 0.3, 0.2] * 8, [5, 6, 7] * 8)

    def plan_after(rank, token_s=0.02):
        policy = SequoiaPolicy(EIGHT, costs(token_s))
        requests = requests_of(1)
        for _ in range(20 * RESOLVE):
            step, plan = begun(policy, requests)
            [tree] = step.select([beam], plan).trees
            path = list[int]()
            node = None if rank is None else tree.child(0, 5 + rank)
            while node is not None and rank is not None:
                path.append(node)
                node = tree.child(node, 5 + rank)
            step.observe([path], NO_TIME)
        return plan_of(policy, requests)

    longest = plan_after(0)
    assert (longest.depth, longest.width) == (8, 1)
    assert plan_after(None).depth == 0
    assert plan_after(2, token_s=0.001).width == 3  # only wide trees hold it
    new = [
        plan_of(SequoiaPolicy(EIGHT, costs(0.02)), requests_of(number))
        for number in (1, 8, 64, 500)
    ]
    nodes = [plan.depth * plan.width for plan in new]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > 3 and nodes[-1] == 0
