"""Goodput of chains: SmartSpec's and TurboSpec's model of what speculation yields per second (arXiv 2406.14066)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree


def chain_tokens(acceptance: float, length: IntArray | int) -> FloatArray:
    """Expected tokens of verifying a chain: 1 + a + ... + a^length (SmartSpec, equation 8).

    Args:
        acceptance: probability in [0, 1] that a drafted token is accepted after those before it were.
        length: drafted tokens; 0 decodes plainly.
    """
    lengths = np.asarray(length, dtype=np.float64)
    if acceptance >= 1.0:
        return lengths + 1.0
    tokens: FloatArray = (1.0 - acceptance ** (lengths + 1.0)) / (1.0 - acceptance)
    return tokens


def heads_tokens(acceptances: FloatArray | Sequence[float], widths: IntArray | Sequence[int]) -> FloatArray:
    """Expected tokens of a full tree of heads, the j-th proposing ``widths[j]`` candidates (Medusa; equation 10).

    [FIX] the printed sum lacks the term of no accepted head, and its factor (1 - a) lacks the exponent k: a head
    fails when all of its k candidates do, each accepted with ``acceptances[j]``.

    Args:
        acceptances: [heads].
        widths: [..., heads]; a tree ends before the first 0.
    """
    accepted = 1.0 - (1.0 - np.asarray(acceptances)) ** np.asarray(widths)
    tokens: FloatArray = 1.0 + np.cumprod(accepted, axis=-1).sum(axis=-1)
    return tokens


def heads_nodes(widths: IntArray | Sequence[int]) -> IntArray:
    """Nodes of that tree, the root counted; ``widths`` as there."""
    nodes: IntArray = 1 + np.cumprod(np.asarray(widths, dtype=np.int64), axis=-1).sum(axis=-1)
    return nodes


@functools.cache
def heads_shapes(max_depth: int, max_width: int) -> IntArray:
    """Widths of every tree of heads that has at most ``max_width`` nodes in a layer.  -> [shapes, max_depth] int64

    The first is no tree at all; shapes of fewer heads end in zeros.
    """
    shapes: list[tuple[int, ...]] = [()]
    for shape in shapes:  # grows while it is read
        if len(shape) < max_depth:
            shapes += [(*shape, width) for width in range(1, max_width // math.prod(shape) + 1)]
    table = np.zeros((len(shapes), max_depth), dtype=np.int64)
    for row, shape in zip(table, shapes, strict=True):
        row[: len(shape)] = shape
    return table


def confident_length(tree: TokenTree, min_confidence: float) -> int:
    """Depth to which Algorithm 3 drafts: a token that is no more probable than this is the last one proposed.

    Confidence is the probability of a token after its parent, not that of its path.
    """
    parents = tree.parents[1:]
    is_unsure = tree.path_probs[1:] <= min_confidence * tree.path_probs[parents]
    return int(tree.depths[1:][is_unsure].min(initial=tree.max_depth))


def best_length(
    tokens: Callable[[IntArray], FloatArray], seconds: Callable[[IntArray], FloatArray], max_length: int, bias: float
) -> int:
    """The chain length 0 .. ``max_length`` of the highest goodput, tokens over seconds (Algorithm 1 and 2).

    [FIX] 0 is among them, so that speculation can be turned off; the printed Algorithm 1 multiplies by the number of
    requests twice, which does not change the choice.

    Args:
        bias: factor on the goodput of length 0, for what speculation costs beside its forwards.
    """
    lengths = np.arange(max_length + 1)
    goodput = tokens(lengths) / seconds(lengths)
    goodput[0] *= bias
    return int(np.argmax(goodput))


class MovingAcceptance:
    """Of the drafted tokens that were tried lately, how many were accepted.

    A chain is tried up to the first token that is refused. [FIX] dividing by all drafted tokens would take those behind
    a refusal for refused, and averaging the ratios of steps would weigh a chain refused at once like a long one; no a
    of equation 8 fits either. So accepted and tried tokens are averaged apart.
    """

    START, KEEP = 0.7, 0.85  # of the released code

    def __init__(self) -> None:
        self._tried, self._accepted = 1.0, self.START

    @property
    def rate(self) -> float:
        """Accepted over tried, in [0, 1]."""
        return self._accepted / self._tried

    def observe(self, tried: int, accepted: int) -> None:
        """Take in a step: tokens that were tried, and those of them that were accepted."""
        if tried:
            self._tried = self.KEEP * self._tried + (1.0 - self.KEEP) * tried
            self._accepted = self.KEEP * self._accepted + (1.0 - self.KEEP) * accepted
