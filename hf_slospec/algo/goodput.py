"""Goodput of chains: SmartSpec's and TurboSpec's model of what speculation yields per second (arXiv 2406.14066)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hf_slospec.algo.tree import FloatArray, IntArray


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


def heads_tokens(acceptances: Sequence[float], widths: Sequence[int]) -> float:
    """Expected tokens of a full tree of heads, the j-th proposing ``widths[j]`` candidates (Medusa; equation 10).

    [FIX] the printed sum lacks the term of no accepted head, and its factor (1 - a) lacks the exponent k: a head
    fails when all of its k candidates do, each accepted with ``acceptances[j]``.
    """
    accepted = 1.0 - (1.0 - np.asarray(acceptances)) ** np.asarray(widths)
    return float(1.0 + np.cumprod(accepted).sum())


def heads_nodes(widths: Sequence[int]) -> int:
    """Nodes of that tree, the root counted."""
    return 1 + int(np.cumprod(widths).sum())


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
        return self._accepted / self._tried

    def observe(self, tried: int, accepted: int) -> None:
        if tried:
            self._tried = self.KEEP * self._tried + (1.0 - self.KEEP) * tried
            self._accepted = self.KEEP * self._accepted + (1.0 - self.KEEP) * accepted
