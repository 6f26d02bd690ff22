"""Goodput of chains: SmartSpec's and TurboSpec's model of tokens per second (arXiv 2406.14066)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray, TokenTree


def chain_tokens(acceptance: float, length: IntArray | int) -> FloatArray:
    """Return the expected tokens of verifying a chain: 1 + a + ... + a^length (SmartSpec, equation
    8).

    Args:
        acceptance: a in [0, 1], probability that a drafted token is accepted given that its parent
            was.
        length: drafted tokens; 0: plain decoding.
    """
    lengths = np.asarray(length, dtype=np.float64)
    if acceptance >= 1.0:
        return lengths + 1.0
    tokens: FloatArray = (1.0 - acceptance ** (lengths + 1.0)) / (1.0 - acceptance)
    return tokens


def heads_tokens(
    acceptances: FloatArray | Sequence[float], widths: IntArray | Sequence[int]
) -> FloatArray:
    """Return the expected tokens of a full tree of heads, head j proposing ``widths[j]`` candidates
    (equation 10).

    [FIX] the printed sum lacks the term of no accepted head, and its factor (1 - a) lacks the
    exponent k: a head fails when all of its k candidates do, each accepted with ``acceptances[j]``.

    Args:
        acceptances: [heads] f64 in [0, 1], acceptance rate of a candidate of each head.
        widths: [..., heads] int64; a tree ends before the first 0.

    Returns:
        [...] f64.
    """
    accepted = 1.0 - (1.0 - np.asarray(acceptances)) ** np.asarray(widths)
    tokens: FloatArray = 1.0 + np.cumprod(accepted, axis=-1).sum(axis=-1)
    return tokens


def heads_nodes(widths: IntArray | Sequence[int]) -> IntArray:
    """Return the number of nodes of full trees of heads, root included; ``widths`` as in
    :func:`heads_tokens`.
    """
    nodes: IntArray = 1 + np.cumprod(np.asarray(widths, dtype=np.int64), axis=-1).sum(axis=-1)
    return nodes


@functools.cache
def heads_shapes(max_depth: int, max_width: int) -> IntArray:
    """Return the widths of all trees of heads with at most ``max_width`` nodes per level.

    Returns:
        [shapes, max_depth] int64. The first shape is a lone root; shapes with fewer heads end in
        zeros.
    """
    shapes: list[tuple[int, ...]] = [()]
    for shape in shapes:  # the list grows during the iteration
        if len(shape) < max_depth:
            shapes += [(*shape, width) for width in range(1, max_width // math.prod(shape) + 1)]
    table = np.zeros((len(shapes), max_depth), dtype=np.int64)
    for row, shape in zip(table, shapes, strict=True):
        row[: len(shape)] = shape
    return table


def confident_length(tree: TokenTree, min_confidence: float) -> int:
    """Return the depth to which Algorithm 3 drafts: the depth of the first token whose confidence
    is at most ``min_confidence``.

    Confidence is the token's probability given its path, not the probability of the path.
    """
    parents = tree.parents[1:]
    is_unsure = tree.path_probs[1:] <= min_confidence * tree.path_probs[parents]
    return int(tree.depths[1:][is_unsure].min(initial=tree.max_depth))


def best_batch(
    tokens: FloatArray, seconds: FloatArray, has_slots: BoolArray, bias: float
) -> tuple[int, int]:
    """Return the batch and the chain length of the highest goodput, tokens over seconds (Algorithms
    1 and 2).

    Each row stands for a batch: with several rows, the one, two, ... requests that arrived first.
    Among equal goodputs the smaller batch, then the shorter length is returned. [FIX] length 0 is
    included, so that speculation can be turned off; the printed Algorithm 1 multiplies by the
    number of requests twice, and the printed Algorithm 2 runs all requests whichever batch was
    best.

    Args:
        tokens: [batches, lengths] f64, expected tokens of a step.
        seconds: [batches, lengths] f64, predicted seconds of a step.
        has_slots: [batches, lengths] bool, whether K/V slots suffice.
        bias: factor on the goodput of length 0, for costs of speculation besides its forwards.

    Returns:
        Row of the batch, and length of the chains.
    """
    goodput = tokens / seconds
    goodput[:, 0] *= bias
    goodput[~has_slots] = -1.0
    row, length = np.unravel_index(np.argmax(goodput), goodput.shape)
    return int(row), int(length)


class MovingAcceptance:
    """Moving average of the acceptance rate of tried tokens.

    The tokens of a chain are tried up to the first rejected one. [FIX] dividing by all drafted
    tokens would count those after a rejection as rejected, and averaging the ratios of steps would
    give a chain that is rejected at once the weight of a long one; neither estimates the acceptance
    rate a of equation 8. So accepted and tried tokens are averaged separately. [FIX] The released
    weight of earlier steps, 0.85, forgets within some six steps: with one to three requests the
    rate then falls by chance until nothing is drafted. Here the window is about 20 steps."""

    # Initial rate, as in the released code, and weight of earlier steps in the averages
    START = 0.7
    KEEP = 0.95

    def __init__(self) -> None:
        self._tried = 1.0
        self._accepted = self.START

    @property
    def rate(self) -> float:
        """Acceptance rate, accepted over tried, in [0, 1]."""
        return self._accepted / self._tried

    def observe(self, tried: int, accepted: int) -> None:
        """Update the averages with one step's numbers of tried and of accepted tokens."""
        if tried:
            self._tried = self.KEEP * self._tried + (1.0 - self.KEEP) * tried
            self._accepted = self.KEEP * self._accepted + (1.0 - self.KEEP) * accepted
