"""Static trees: taken out of candidate trees as the plain loop does, and Sequoia's against every
tree there is.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.lab.policies.sequoia import SPECINFER, Sequoia, StaticTree
from hf_slospec.tree.tree import ROOT, Forest
from tests.support.toys.trees import SEEDS, UNEVEN, path_to, random_tree

Shape = tuple["Shape", ...]  # a tree as those of its children, by rank

EXPANSION = (1, 1, 3, 1, 1, 1, 1)


def test_specinfers_tree_has_18_nodes():
    assert StaticTree.of_expansion(EXPANSION) == SPECINFER
    assert (SPECINFER.num_nodes, SPECINFER.max_depth, SPECINFER.max_width) == (18, 7, 3)


@given(seed=SEEDS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3))
@settings(deadline=None)
def test_a_static_tree_keeps_the_best_children_of_every_node(seed, sizes):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, UNEVEN) for size in sizes]
    forest = Forest.of(trees)
    for tree, static in zip(trees, forest.subtrees(SPECINFER.within(forest)), strict=True):
        kept = {ROOT}
        for node in range(tree.num_nodes):
            if node in kept and tree.depths[node] < len(EXPANSION):
                children = [v for v in range(tree.num_nodes) if tree.parents[v] == node]
                children.sort(key=lambda v: -tree.path_probs[v])
                kept.update(children[: EXPANSION[tree.depths[node]]])
        static.check()
        expected = tree.subtree(np.array(list(kept)))
        assert [path_to(static, v) for v in range(static.num_nodes)] == [
            path_to(expected, v) for v in range(expected.num_nodes)
        ]


def shapes(num_nodes, num_levels, max_children):
    """Every tree of this size, on at most so many levels."""

    def children(num_left, count):
        if num_left == 0:
            yield ()
        elif count and num_levels > 1:
            for size in range(1, num_left + 1):
                for first in all_shapes(size, num_levels - 1, max_children):
                    for others in children(num_left - size, count - 1):
                        yield (first, *others)

    yield from children(num_nodes - 1, max_children)


@functools.cache
def all_shapes(num_nodes, num_levels, max_children):
    return tuple(shapes(num_nodes, num_levels, max_children))


def expected_tokens(tree, acceptance):
    """Tokens a step commits, if the child of rank r is accepted with ``acceptance[r]`` once its
    parent is.
    """
    path_probs = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        path_probs.append(path_probs[parent] * float(acceptance[rank]))
    return sum(path_probs)


def worth(shape, acceptance):
    return 1.0 + sum(
        p * worth(child, acceptance) for p, child in zip(acceptance, shape, strict=False)
    )


@given(acceptance=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.4, 0.7, 1.0]), min_size=1, max_size=3))
@settings(deadline=None, max_examples=15)
def test_sequoias_trees_are_the_best_of_all(acceptance):
    """Property 11, for every tree there is and so for those made by hand."""
    rates = np.array(acceptance)
    table = Sequoia(rates, 7, 6)
    for num_nodes in range(1, 8):
        for num_levels in range(1, 7):
            best = max(
                (worth(s, rates) for s in all_shapes(num_nodes, num_levels, len(rates))),
                default=-np.inf,
            )
            assert table.expected[num_nodes, num_levels] == pytest.approx(best)
            if best > 0.0:
                tree = table.tree(num_nodes, num_levels)
                assert tree.num_nodes == num_nodes
                assert tree.max_depth < num_levels
                assert expected_tokens(tree, rates) == pytest.approx(best)
                siblings = [
                    {r for p, r in zip(tree.parents, tree.ranks, strict=True) if p == v}
                    for v in range(7)
                ]
                assert all(ranks == set(range(len(ranks))) for ranks in siblings)


def test_expected_tokens_rise_with_nodes_and_levels():
    table = Sequoia(np.array([0.6, 0.2, 0.1, 0.05]), 40, 9)
    feasible = table.expected[1:, 1:]
    assert (feasible[:, 1:] >= feasible[:, :-1] - 1e-12).all()
    for column in feasible.T:
        values = column[column > 0.0]
        assert (np.diff(values) >= -1e-12).all()
    assert table.expected[18, 8] > expected_tokens(SPECINFER, table.acceptance)
    assert table.expected[18, 8] > expected_tokens(
        StaticTree.of_expansion([1] * 17), table.acceptance
    )


@pytest.mark.parametrize(
    ("node_s", "level_s"), [(0.0, 0.0), (0.02, 0.05), (0.1, 0.0), (0.0, 0.5), (3.0, 3.0)]
)
def test_the_chosen_size_has_the_best_ratio(node_s, level_s):
    table = Sequoia(np.array([0.7, 0.2]), 24, 7)
    nodes, levels = table.best_size(lambda m, depth: 1.0 + node_s * m + level_s * (depth - 1), 7)
    ratios = {
        (m, level): table.expected[m, level] / (1.0 + node_s * m + level_s * (level - 1))
        for m in range(1, 25)
        for level in range(1, 8)
    }
    assert ratios[nodes, levels] == max(ratios.values())
    if node_s == 3.0:
        assert (nodes, levels) == (1, 1)  # speculation is not worth it
