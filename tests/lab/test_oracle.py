"""AdaServe's Algorithm 1 with hindsight, in the simulator."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.config import SLOSpecConfig
from hf_slospec.lab.models import AdaServeOraclePolicy, accepted_nodes
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.lab.workload import Job
from hf_slospec.policies.adaserve import required_tokens
from tests.lab.test_simulation import Watched
from tests.support.policy_costs import begun, costs, late
from tests.support.toys.trees import SEEDS, grow

TREE = ([0, 0, 1, 1, 2, 3], [0.6, 0.4, 0.5, 0.3, 0.9, 0.5], [0, 1, 0, 1, 0, 0])


@given(
    seed=SEEDS,
    slos_s=st.lists(st.sampled_from([None, 0.2, 0.5, 2.0]), min_size=1, max_size=3),
    budget=st.integers(1, 12),
    now_s=st.sampled_from([0.5, 1.0, 1.5]),
)
@settings(deadline=None)
def test_hindsight_meets_what_can_be_met_and_wastes_nothing(seed, slos_s, budget, now_s):
    rng = np.random.default_rng(seed)
    library = Library([TextModel(0.8).write(rng, 20) for _ in slos_s])
    requests = [late(index, slo_s, 0.25) for index, slo_s in enumerate(slos_s)]
    policy = AdaServeOraclePolicy(
        library, SLOSpecConfig(policy="adaserve", token_budget=budget), costs(0.01)
    )
    step, plan = begun(policy, requests, now_s)
    trees = [grow(*TREE) for _ in requests]
    hits = [accepted_nodes(library, *pair) for pair in zip(requests, trees, strict=True)]
    selection = step.select(trees, plan)
    sizes = [tree.num_nodes for tree in selection.trees]
    for tree, chosen, nodes in zip(trees, selection.trees, hits, strict=True):
        assert (
            chosen.tokens.tolist() == tree.tokens[nodes[: chosen.num_nodes]].tolist()
        )  # Only nodes on the true path.
        assert chosen.path_probs.tolist() == tree.path_probs[nodes[: chosen.num_nodes]].tolist()
    assert sum(sizes) == max(min(budget, sum(map(len, hits))), len(requests))

    required = [required_tokens(*r.decoded(now_s), selection.step_s, r.pace_s) for r in requests]
    needed = [min(need, len(nodes)) for need, nodes in zip(required, hits, strict=True)]
    options = itertools.product(*(range(1, len(nodes) + 1) for nodes in hits))
    most = max(
        (
            sum(size >= need for size, need in zip(sizes, needed, strict=True))
            for sizes in options
            if sum(sizes) <= budget
        ),
        default=None,
    )
    if most == len(requests):  # all can be met, so all are
        assert all(size >= need for size, need in zip(sizes, needed, strict=True))


def test_hindsight_attains_more_than_estimates():
    rng = np.random.default_rng(0)
    jobs = [Job(float(at_s), 60, 60, 0.016) for at_s in np.cumsum(rng.exponential(0.05, 40))]

    def run(system, oracle=False):
        watched = Watched(jobs, f'{system} {{"token_budget": 96, "max_batch": 32}}', oracle=oracle)
        watched.result = watched.run()
        return watched

    hindsight = run("adaserve-oracle", True)
    estimates = run("adaserve")
    assert hindsight.tokens == estimates.tokens
    figures, others = (each.result.summary() for each in (hindsight, estimates))
    assert figures["attainment"] > others["attainment"]
    assert (
        hindsight.result.totals.nodes
        == hindsight.result.totals.committed
        < estimates.result.totals.nodes
    )


def test_a_lone_root_is_kept_where_nothing_will_be_accepted():
    library = Library([TextModel(0.5).write(np.random.default_rng(0), 5)])
    library.ranks[:] = 3
    assert accepted_nodes(library, late(0, None), grow(*TREE)).tolist() == [0]
