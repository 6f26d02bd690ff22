"""Sample-then-match is lossless: law of the output, expected tokens, greedy identity, stopping."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec.tree.accept import accept
from hf_slospec.tree.tree import ROOT
from tests.support.toys.trees import (
    SEEDS,
    draw,
    markov_model,
    path_to,
    random_tree,
    tree_of_paths,
)

VOCAB = 3
CONTEXT = (0, 1)
SHAPES = {
    "root only": [],
    "one node": [(2,)],
    "chain": [(0, 1, 2)],
    "fan": [(0,), (1,), (2,)],
    "ragged": [(0, 1), (0, 2, 2), (1,)],
    "bushy": list(itertools.product(range(VOCAB), repeat=3)),
    "deeper than the output": [(0, 0, 0, 0, 0), (1, 2, 0, 1, 2), (2, 2, 2, 2, 2)],
}


def penalised(next_probs, tokens):
    """A processor that looks at all tokens so far: forbids an immediate repetition, prefers tokens
    not seen yet.
    """
    probs = next_probs(tokens) * [
        0.3 if token in tokens[len(CONTEXT) :] else 1.0 for token in range(VOCAB)
    ]
    probs[tokens[-1]] = 0.0
    return probs / probs.sum()


def run_accept(tree, choose, at_most=99):
    """What a step emits and accepts when the request is finished with its ``at_most``-th token."""
    emitted = []

    def emit(token):
        emitted.append(token)
        return None if len(emitted) == at_most else token

    return emitted, accept(tree, choose, emit)


def sample_step(tree, next_probs, before, rng, at_most=99):
    """Tokens of one step, each sampled after the tree's own path to the node."""

    def choose(node):
        return draw(next_probs([*before, *path_to(tree, node)]), rng.random())

    return run_accept(tree, choose, at_most)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_committed_tokens_is_the_sum_of_path_probabilities(shape):
    rng = np.random.default_rng(0)
    next_probs = markov_model(rng, VOCAB)
    tree = tree_of_paths(next_probs, CONTEXT, SHAPES[shape])
    counts = np.array([len(sample_step(tree, next_probs, CONTEXT, rng)) for _ in range(8000)])
    assert counts.min() >= 1
    assert counts.max() <= tree.max_depth + 1
    error = 4.0 * counts.std() / math.sqrt(len(counts))
    assert counts.mean() == pytest.approx(tree.path_probs.sum(), abs=error + 1e-9)


@pytest.mark.parametrize(
    ("shape", "is_processed"), [*((shape, True) for shape in SHAPES), ("bushy", False)]
)
def test_output_has_the_distribution_of_plain_sampling(shape, is_processed):
    rng = np.random.default_rng(3)
    target = markov_model(rng, VOCAB)
    draft = markov_model(rng, VOCAB)
    next_probs = functools.partial(penalised, target) if is_processed else target
    trees = {
        last: tree_of_paths(draft, last, SHAPES[shape])
        for last in itertools.product(range(VOCAB), repeat=2)
    }
    length = 3
    trials = 8000

    def sample():
        tokens = list(CONTEXT)
        while (left := length + len(CONTEXT) - len(tokens)) > 0:
            tokens += sample_step(trees[tokens[-2], tokens[-1]], next_probs, tokens, rng, left)
        return tuple(tokens[len(CONTEXT) :])

    counts = Counter(sample() for _ in range(trials))
    chi_square = 0.0
    num_possible = 0
    for sequence in itertools.product(range(VOCAB), repeat=length):
        steps = [next_probs([*CONTEXT, *sequence[:i]])[token] for i, token in enumerate(sequence)]
        expected = trials * math.prod(steps)
        if expected == 0.0:
            assert counts[sequence] == 0
            continue
        assert expected > 5.0  # or chi-square would not hold
        chi_square += (counts[sequence] - expected) ** 2 / expected
        num_possible += 1
    freedom = num_possible - 1
    assert chi_square < freedom + 4.0 * math.sqrt(2.0 * freedom)


@given(seed=SEEDS, paths=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), max_size=12))
@settings(deadline=None)
def test_greedy_output_equals_greedy_decoding_for_any_tree(seed, paths):
    next_probs = markov_model(np.random.default_rng(seed), VOCAB)
    plain = list(CONTEXT)
    for _ in range(6):
        plain.append(int(next_probs(plain).argmax()))
    plain = plain[len(CONTEXT) :]

    tree = tree_of_paths(next_probs, CONTEXT, paths)
    emitted, accepted = run_accept(
        tree, lambda node: int(next_probs([*CONTEXT, *path_to(tree, node)]).argmax())
    )
    in_tree = {tuple(path[:end]) for path in paths for end in range(len(path) + 1)}
    longest = max(end for end in range(6) if end == 0 or tuple(plain[:end]) in in_tree)
    assert emitted == plain[: longest + 1]  # as far as the tree reaches, and the bonus token
    assert path_to(tree, accepted[-1] if accepted else ROOT) == plain[:longest]
    assert len(accepted) == longest <= tree.max_depth


@given(seed=SEEDS, size=st.integers(1, 30), stop_after=st.integers(1, 6))
@settings(deadline=None)
def test_walk_goes_down_one_path_and_stops_when_told(seed, size, stop_after):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, size)
    choices = {node: int(rng.integers(0, 4)) for node in range(size)}
    endless, _ = run_accept(tree, choices.__getitem__)
    assert 1 <= len(endless) <= tree.max_depth + 1

    asked = []

    def choose(node):
        asked.append(node)
        return choices[node]

    emitted, accepted = run_accept(tree, choose, stop_after)
    assert emitted == endless[:stop_after]
    # The target is asked once per visited node, never about others.
    assert asked == [ROOT, *accepted]
    assert [int(tree.parents[node]) for node in accepted] == asked[:-1]
    assert [int(tree.tokens[node]) for node in accepted] == emitted[:-1]
