"""Random token trees and small exact models for the tests of algorithms and engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from hf_slospec.model.batch import Stored
from hf_slospec.tree.tree import ROOT, FloatArray, TokenTree

NextProbs = Callable[
    [Sequence[int]], FloatArray
]  # all tokens so far -> [vocab], probabilities of the next one

SEEDS = st.integers(0, 2**32 - 1)
# Powers of two: sums of path probabilities are exact in any order, so equal sums compare equal and
# ties are true ties.
TIED = (0.0, 0.25, 0.5, 1.0)
UNEVEN = (0.0, 0.1, 0.3, 0.7, 0.9, 1.0)


def stored(num_heads, dim):
    return Stored(num_heads, dim, torch.float32, torch.device("cpu"))


def grow(parents, conditionals, tokens):
    """The tree of nodes 1, 2, ... with these parents, conditional probabilities and tokens; the
    root's token is 0.
    """
    depths = [0]
    path_probs = [1.0]
    for parent, conditional in zip(parents, conditionals, strict=True):
        depths.append(depths[parent] + 1)
        path_probs.append(path_probs[parent] * conditional)
    return TokenTree(
        np.array([0, *tokens]), np.array([-1, *parents]), np.array(depths), np.array(path_probs)
    )


def random_tree(rng, num_nodes, conditionals=TIED):
    """Any shape; siblings may carry equal tokens and their probabilities need not sum to 1."""
    parents = [int(rng.integers(node)) for node in range(1, num_nodes)]
    return grow(
        parents,
        list(rng.choice(conditionals, len(parents))),
        list(rng.integers(0, 4, len(parents))),
    )


def path_to(tree, node):
    """The tokens from below the root down to ``node``."""
    return [] if node == ROOT else [*path_to(tree, int(tree.parents[node])), int(tree.tokens[node])]


def is_parent_closed(tree, nodes):
    kept = {ROOT, *(int(node) for node in nodes)}
    return all(int(tree.parents[node]) in kept for node in kept - {ROOT})


def markov_model(rng, vocab):
    """An exact model: the next token depends on the last two, and none is rarer than 0.4 / vocab."""
    table = 0.6 * rng.dirichlet(np.full(vocab, 0.3), (vocab, vocab)) + 0.4 / vocab
    return lambda tokens: table[tokens[-2], tokens[-1]]


def draw(probs, uniform):
    """The token that a uniform number in [0, 1) stands for."""
    return int(np.searchsorted(np.cumsum(probs), uniform, side="right"))


def tree_of_paths(next_probs, context, paths):
    """The tree that holds ``paths`` after ``context``, with the path probabilities of
    ``next_probs``.
    """
    nodes = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    order = [(), *sorted(nodes, key=lambda path: (len(path), path))]
    tree = grow(
        [order.index(path[:-1]) for path in order[1:]],
        [float(next_probs([*context, *path[:-1]])[path[-1]]) for path in order[1:]],
        [path[-1] for path in order[1:]],
    )
    tree.tokens[ROOT] = context[-1]
    return tree


def beam_tree(next_probs, context, depth, width):
    """All nodes of a beam search; tokens of probability 0 are not drafted."""
    layer = [((), 1.0)]
    paths = []
    for _ in range(depth):
        children = [
            ((*path, token), prob * conditional)
            for path, prob in layer
            for token, conditional in enumerate(next_probs([*context, *path]))
            if conditional > 0.0
        ]
        layer = sorted(children, key=lambda child: -child[1])[:width]
        paths += [path for path, _ in layer]
    return tree_of_paths(next_probs, context, paths)


def chain(*conditionals):
    return grow(range(len(conditionals)), conditionals, [1] * len(conditionals))


def fan(*conditionals):
    return grow([0] * len(conditionals), conditionals, range(len(conditionals)))


def total(trees, chosen):
    return math.fsum(
        tree.path_probs[nodes].sum() for tree, nodes in zip(trees, chosen, strict=True)
    )


def affine(num_tokens):
    return 0.25 + num_tokens / 64


def staircase(num_tokens):
    """Flat to 8, 16, ... tokens, as tiled kernels are, and steeper beyond 24."""
    return 0.25 + np.ceil(num_tokens / 8) / 8 + np.maximum(num_tokens - 24, 0) / 16
