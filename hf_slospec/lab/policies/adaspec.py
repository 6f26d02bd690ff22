"""AdaSpec (arXiv 2503.05096): chains are drafted as long as predicted goodput rises, after the
released code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.policies.registry import NamedPolicy, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray, TokenTree

# Constants of the released code.
START = 0.6  # confidence in a token before any was drafted
# CUDA graphs are captured for token counts that are powers of two up to it, then multiples of it
GRAPH_STEP = 32


class AdaSpecPolicy(NamedPolicy):
    """Policy that decides after each drafted level whether the next one will raise the goodput of
    the step.

    The adaptive drafter uses uncalibrated probabilities: a chain yields the sum of its path
    probabilities. A level not drafted yet is predicted by the mean confidence in all tokens so far.
    Drafting stops before a level that is predicted to lower goodput, and after one that has lowered
    it, which is still verified. The SLO-aware estimator refuses lengths whose step would take
    longer than the tightest TPOT SLO; the released code has this test commented out. The confidence
    prior verifier drops the least probable tokens down to the next smaller number of tokens that
    has a CUDA graph, unless this lowers goodput. [FIX] it drops the tokens of lowest path
    probability; the released code compares the last drafted tokens of chains even after these were
    dropped.

    As printed, there are no exploratory drafts: once the first level does not pay, it is tried
    again only when the batch or the costs have changed.
    """

    name = "adaspec"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self._sum_confidence = START
        self._num_confidences = 1.0

    @property
    def confidence(self) -> float:
        """Mean conditional probability that the draft gave its tokens."""
        return self._sum_confidence / self._num_confidences

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        self._requests = requests
        self._num_prefill_tokens = num_prefill_tokens
        self._tightest_slo_s = min(np.inf if r.pace_s is None else r.pace_s for r in requests)
        # State of the chains drafted so far in this step
        self._length = 0
        self._expected_tokens = float(len(requests))
        self._last_probs: FloatArray | float = 1.0
        self._best_goodput = self._goodput(self._expected_tokens, 0)
        max_depth = max_useful_depth(requests, self.config.max_depth)
        predicted = len(requests) * (1.0 + self.confidence)
        if not max_depth or self._goodput(predicted, 1) <= self._best_goodput:
            return Plan(0, 1)
        return Plan(max_depth, 1, goes_on=self._goes_on)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        forest = Forest.of(without_useless_nodes(requests, candidates))
        is_kept = self._pruned(forest)
        expected = np.bincount(forest.tree_of, forest.path_probs * is_kept)
        return Selection(
            forest.subtrees(is_kept), expected.tolist(), self._seconds(forest, is_kept)
        )

    def _goes_on(self, path_probs: FloatArray, rows: IntArray) -> BoolArray:
        """Record a drafted level of all chains; return all True if the next level is predicted to
        raise goodput, all False otherwise.

        The engine calls this as :attr:`~hf_slospec.engine.interfaces.Plan.goes_on`.
        """
        return np.full(len(rows), self._raises_goodput(path_probs[:, 0]))

    def _raises_goodput(self, probs: FloatArray) -> bool:
        total = float(probs.sum())
        self._length += 1
        self._expected_tokens += total
        goodput = self._goodput(self._expected_tokens, self._length)
        if goodput < self._best_goodput:
            return False
        self._best_goodput = goodput
        confidences = probs / np.maximum(self._last_probs, np.finfo(np.float64).tiny)
        self._sum_confidence += float(confidences.sum())
        self._num_confidences += len(probs)
        self._last_probs = probs
        predicted = self._expected_tokens + self.confidence * total
        return self._goodput(predicted, self._length + 1) >= goodput

    def _goodput(self, expected: float, length: int) -> float:
        """Return the expected tokens per second of a step with chains of this length; -1 if the
        step would take longer than the tightest TPOT SLO.
        """
        num_tokens = len(self._requests) * (length + 1) + self._num_prefill_tokens
        seconds = float(self.costs.shape_s(self._requests, length, 1, num_tokens))
        return -1.0 if length and seconds > self._tightest_slo_s else expected / seconds

    def _pruned(self, forest: Forest) -> BoolArray:
        """Return a mask of the nodes to verify, roots included.  -> [num_nodes] bool"""
        is_whole: BoolArray = np.ones(len(forest.depths), dtype=np.bool_)
        is_kept = forest.depths == 0
        ranked = forest.canonical(forest.path_probs)
        is_kept[ranked[: max(smaller_size(len(is_whole)) - len(forest.trees), 0)]] = True
        pruned_rate, whole_rate = (
            float(forest.path_probs[nodes].sum()) / self._seconds(forest, nodes)
            for nodes in (is_kept, is_whole)
        )
        return is_kept if pruned_rate >= whole_rate else is_whole

    def _seconds(self, forest: Forest, is_verified: BoolArray) -> float:
        num_tokens = int(np.count_nonzero(is_verified)) + self._num_prefill_tokens
        return float(self.costs.shape_s(self._requests, int(forest.depths.max()), 1, num_tokens))


def smaller_size(num_tokens: int) -> int:
    """Return the largest token count below ``num_tokens`` for which a CUDA graph is captured; 0 if
    there is none.
    """
    if num_tokens <= GRAPH_STEP:
        return 1 << ((num_tokens - 1).bit_length() - 1) if num_tokens > 1 else 0
    return (num_tokens - 1) // GRAPH_STEP * GRAPH_STEP
