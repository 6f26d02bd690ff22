"""The thesis' algorithms: growth and pruning against the global best nodes, importance against its
plain loop.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.lab.policies.optimal import optimal_nodes
from hf_slospec.lab.policies.thesis import StopRule, grown_nodes, important_nodes
from hf_slospec.tree.tree import ROOT, Forest, TokenTree
from tests.support.breadth import quick_or
from tests.support.toys.trees import (
    SEEDS,
    TIED,
    UNEVEN,
    grow,
    is_parent_closed,
    random_tree,
    total,
)

NO_LIMIT = 99
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
PROBS = st.sampled_from([TIED, UNEVEN, (1.0,)])


@given(seed=SEEDS, sizes=SIZES, budget=st.integers(0, 40))
@settings(deadline=None)
def test_growth_takes_the_globally_best_nodes_where_only_the_budget_binds(seed, sizes, budget):
    """Property 10."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size) for size in sizes]
    grown = grown_nodes(trees, budget, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT)
    best = optimal_nodes(trees, [0.0] * len(trees), max(budget, len(trees)))
    assert best is not None
    assert total(trees, grown) == total(trees, best)
    untied = [
        TokenTree(t.tokens, t.parents, t.depths, t.path_probs * np.exp(-1e-3 * t.depths))
        for t in trees
    ]
    for tree in untied:
        tree.path_probs[1:] *= 1.0 - 1e-5 * rng.random(tree.num_nodes - 1)
    grown = grown_nodes(untied, budget, NO_LIMIT, NO_LIMIT, NO_LIMIT, NO_LIMIT)
    best = optimal_nodes(untied, [0.0] * len(trees), max(budget, len(trees)))
    assert best is not None
    assert [nodes.tolist() for nodes in grown] == [nodes.tolist() for nodes in best]


@given(
    seed=SEEDS,
    sizes=SIZES,
    conditionals=PROBS,
    budget=st.integers(1, 30),
    max_nodes=st.integers(1, 8),
)
@settings(deadline=None, max_examples=quick_or(66, 200))
def test_trees_are_drafted_on_exactly_while_they_grow(seed, sizes, conditionals, budget, max_nodes):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    rule = StopRule(len(trees), max(budget, len(trees)), max_nodes)
    growing = np.arange(len(trees))
    for depth in range(1, max(tree.max_depth for tree in trees) + 1):
        level = np.zeros((len(growing), max(sizes)))
        for row, index in enumerate(growing):
            probs = trees[index].path_probs[trees[index].depths == depth]
            level[row, : len(probs)] = probs
        kept = grown_nodes(trees, max(budget, len(trees)), max_nodes, depth, NO_LIMIT, NO_LIMIT)
        grown = [
            tree.depths[nodes].max(initial=0) == depth
            for tree, nodes in zip(trees, kept, strict=True)
        ]
        goes_on = rule.goes_on(level, growing)
        assert goes_on.tolist() == [grown[index] for index in growing]
        growing = growing[goes_on]


@given(
    seed=SEEDS,
    sizes=SIZES,
    conditionals=PROBS,
    budget=st.integers(0, 30),
    max_nodes=st.integers(1, 8),
    max_depth=st.integers(0, 6),
    max_width=st.integers(1, 4),
    max_children=st.integers(1, 3),
)
@settings(deadline=None, max_examples=quick_or(66, 200))
def test_growth_keeps_its_limits(
    seed, sizes, conditionals, budget, max_nodes, max_depth, max_width, max_children
):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    grown = grown_nodes(trees, budget, max_nodes, max_depth, max_width, max_children)
    assert sum(map(len, grown)) <= max(budget, len(trees))
    for tree, nodes in zip(trees, grown, strict=True):
        assert nodes[0] == ROOT
        assert is_parent_closed(tree, nodes)  # so no child of what was pruned is among them
        assert len(nodes) <= max_nodes
        assert np.bincount(tree.depths[nodes])[1:].max(initial=0) <= max_width
        assert (
            np.bincount(tree.parents[nodes[1:]]).max(initial=0) <= max_children
            if len(nodes) > 1
            else True
        )
        assert tree.depths[nodes].max() <= max_depth
        assert (tree.path_probs[nodes] > 0.0).all()


def test_a_narrow_layer_may_drop_what_its_children_would_have_paid_for():
    tree = grow([0, 0, 1, 2], [0.5, 0.4, 0.1, 1.0], [1, 2, 3, 4])
    [narrow], [wide] = (grown_nodes([tree], 3, NO_LIMIT, NO_LIMIT, width) for width in (1, 2))
    assert narrow.tolist() == [0, 1, 3]
    assert wide.tolist() == [0, 1, 2]  # a tie with the child of node 2: what is kept stays
    better = tree.path_probs[[0, 2, 4]].sum()
    assert total([tree], [narrow]) == pytest.approx(1.55) and better == pytest.approx(1.8)


def printed_loop(trees, required, tpot_slos_s, budget, slack_s, max_slo_nodes):
    """Algorithm 2, one node at a time; ``max_slo_nodes`` None: without AdaServe's limits."""
    chosen = [[ROOT] for _ in trees]

    def best_left(i):
        left = [
            v
            for v in range(1, trees[i].num_nodes)
            if v not in chosen[i] and trees[i].path_probs[v] > 0.0
        ]
        return min(
            left, key=lambda v: (-trees[i].path_probs[v], trees[i].depths[v], v), default=None
        )

    def score(i):
        node = best_left(i)
        tpot_slo_s = tpot_slos_s[i]
        if node is None:
            return -1.0
        if tpot_slo_s is not None and (max_slo_nodes is None or len(chosen[i]) <= max_slo_nodes):
            needed = required[i] + slack_s / tpot_slo_s
            needed = needed if max_slo_nodes is None else min(needed, trees[i].max_depth + 1)
            missing_s = (needed - trees[i].path_probs[chosen[i]].sum()) * tpot_slo_s
            if missing_s > 0.0:
                return missing_s + 1.0
        return float(trees[i].path_probs[node])

    for _ in range(budget - len(trees)):
        k = max(range(len(trees)), key=lambda i: (score(i), -i))
        node = best_left(k)
        if node is None:
            break
        chosen[k].append(node)
    return [sorted(nodes) for nodes in chosen]


@given(
    seed=SEEDS,
    sizes=SIZES,
    conditionals=st.sampled_from([TIED, (0.25,), (1.0,)]),  # their sums are exact
    budget=st.integers(0, 40),
    slack_s=st.sampled_from([0.0, 0.5]),
    max_slo_nodes=st.none() | st.integers(0, 6),
)
@settings(deadline=None, max_examples=quick_or(66, 200))
def test_importance_equals_the_plain_loop(
    seed, sizes, conditionals, budget, slack_s, max_slo_nodes
):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, conditionals) for size in sizes]
    required = (rng.integers(-4, 30, len(trees)) / 4).tolist()
    tpot_slos_s = [[None, 0.25, 0.5, 2.0][i] for i in rng.integers(0, 4, len(trees))]
    chosen = important_nodes(
        trees, required, tpot_slos_s, budget, slack_s=slack_s, max_slo_nodes=max_slo_nodes
    )
    assert [nodes.tolist() for nodes in chosen] == printed_loop(
        trees, required, tpot_slos_s, budget, slack_s, max_slo_nodes
    )
    assert all(is_parent_closed(tree, nodes) for tree, nodes in zip(trees, chosen, strict=True))
    num_reachable = len(Forest.of(trees).canonical(Forest.of(trees).path_probs))
    assert sum(map(len, chosen)) == len(trees) + min(max(budget - len(trees), 0), num_reachable)
