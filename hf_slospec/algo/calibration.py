"""What the draft's probabilities are worth: acceptance by conditional probability, learned while decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.algo.tree import ROOT, BoolArray, FloatArray, IntArray, TokenTree


class Calibration:
    """Replaces conditionals by how often children like them were accepted once their parent was.

    A greedy target takes a draft's favourite more often than the draft's probability says, a poor draft's less often.
    Acceptance is counted per bin of the conditional, for favourites (first children) and other children
    apart; what is believed before counts as ``PRIOR`` observations. Conditionals stay in (0, 1], so path probabilities
    still never rise along a path and every prefix of the canonical order stays connected.
    """

    GREEDY_EXPONENT = 0.6  # fits the embedded pair: favourites at 0.15 / 0.45 / 0.75 are accepted 0.37 / 0.60 / 0.88

    BINS = 10
    PRIOR = 4.0
    MEMORY = 1000.0  # observations per bin after which the oldest fade

    def __init__(self, favourite_exponent: float = 1.0) -> None:
        """Before any observation a favourite's conditional c is believed to be ``c ** favourite_exponent``."""
        self.favourite_exponent = favourite_exponent
        self.trials = np.zeros((2, self.BINS))  # [is favourite, bin]
        self.hits = np.zeros((2, self.BINS))

    def __call__(self, tree: TokenTree) -> TokenTree:
        """The tree with calibrated path probabilities."""
        conditionals, is_favourite = conditionals_of(tree)
        cell = is_favourite.astype(np.int64), self._bins(conditionals)
        believed = np.where(is_favourite, conditionals**self.favourite_exponent, conditionals)
        calibrated = (self.hits[cell] + self.PRIOR * believed) / (self.trials[cell] + self.PRIOR)
        path_probs = np.ones(tree.num_nodes)
        for depth in range(1, tree.max_depth + 1):
            layer = np.flatnonzero(tree.depths == depth)
            path_probs[layer] = path_probs[tree.parents[layer]] * calibrated[layer - 1]
        path_probs[tree.path_probs == 0.0] = 0.0
        return TokenTree(tree.tokens, tree.parents, tree.depths, path_probs)

    def observe(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Take in a verified tree, with the draft's own path probabilities, and the nodes that were accepted."""
        conditionals, is_favourite = conditionals_of(tree)
        was_tried = np.isin(tree.parents[1:], [ROOT, *accepted])
        was_hit = np.isin(np.arange(1, tree.num_nodes), accepted)
        cell = is_favourite[was_tried].astype(np.int64), self._bins(conditionals[was_tried])
        np.add.at(self.trials, cell, 1.0)
        np.add.at(self.hits, cell, was_hit[was_tried].astype(np.float64))
        fade = np.minimum(1.0, self.MEMORY / np.maximum(self.trials, 1.0))
        self.trials *= fade
        self.hits *= fade

    def _bins(self, conditionals: FloatArray) -> IntArray:
        return np.minimum((conditionals * self.BINS).astype(np.int64), self.BINS - 1)


def conditionals_of(tree: TokenTree) -> tuple[FloatArray, BoolArray]:
    """Every non-root node's conditional probability, and whether it is its parent's first child.

    -> [num_nodes - 1] f64 and [num_nodes - 1] bool; a conditional under a parent of probability 0 is 0
    """
    parents = tree.parents[1:]
    below = tree.path_probs[parents]
    conditionals = np.divide(tree.path_probs[1:], below, out=np.zeros(len(parents)), where=below > 0.0)
    is_first = np.zeros(len(parents), dtype=np.bool_)
    is_first[np.unique(parents, return_index=True)[1]] = True
    return np.minimum(conditionals, 1.0), is_first
