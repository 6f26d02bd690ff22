"""AdaSpec (arXiv 2503.05096): chains are drafted as long as predicted goodput rises, after the
released code.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.interfaces import Plan, PolicyStep, Selection
from hf_slospec.policies.registry import NamedPolicy, max_useful_depth, without_useless_nodes
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray

# Constants of the released code.
START = 0.6  # confidence in a token before any was drafted
GRAPH_STEP = 32  # sizes of captured forwards: powers of two up to it, then multiples of it


@dataclass(frozen=True)
class _Batch:
    """Requests of one step."""

    num_requests: int
    num_keys: int  # cached tokens of all requests
    num_prefill_tokens: int
    tightest_slo_s: float  # TPOT SLO; inf without any


@dataclass
class _Chains:
    """Chains drafted so far."""

    expected: float  # expected tokens of the step
    goodput: float  # expected tokens per second
    length: int = 0
    last_probs: FloatArray | float = 1.0  # [num_drafting], path probabilities of their last tokens


class AdaSpecPolicy(NamedPolicy):
    """Policy that decides after each drafted level whether the next one will raise the goodput of
    the step.

    The adaptive drafter uses uncalibrated probabilities: a chain yields the sum of its path
        probabilities. A level not
    drafted yet is predicted by the mean confidence in all tokens so far. Drafting stops before a
    level that is predicted to lower goodput, and after one that has lowered it, which is still
    verified. The SLO-aware estimator refuses lengths whose step would take longer than the tightest
    TPOT SLO; the released code has this test commented out. The confidence prior verifier drops the
    least probable tokens down to the next smaller size of a captured forward unless this lowers
    goodput. [FIX] it drops the tokens of lowest path probability; the released code compares the
    last drafted tokens of chains even after these were dropped.

    As printed, there are no exploratory drafts: once the first level does not pay, it is tried
        again only when the
    batch or the costs have changed.
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

    def step(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> PolicyStep:
        num_requests = len(requests)
        num_keys = sum(len(request.tokens) for request in requests)
        tightest_slo_s = min(np.inf if r.pace_s is None else r.pace_s for r in requests)
        batch = _Batch(num_requests, num_keys, num_prefill_tokens, tightest_slo_s)
        chains = _Chains(num_requests, self._goodput(batch, num_requests, 0))
        max_depth = max_useful_depth(requests, self.config.max_depth)
        if (
            not max_depth
            or self._goodput(batch, num_requests * (1.0 + self.confidence), 1) <= chains.goodput
        ):
            candidates, _ = yield Plan(0, 1)
        else:
            candidates, _ = yield Plan(
                max_depth, 1, goes_on=functools.partial(self._goes_on, batch, chains)
            )
        forest = Forest.of(without_useless_nodes(requests, candidates))
        is_kept = self._pruned(batch, forest)
        expected = np.bincount(forest.tree_of, forest.path_probs * is_kept)
        yield Selection(
            forest.subtrees(is_kept), expected.tolist(), self._seconds(batch, forest, is_kept)
        )

    def _goes_on(
        self, batch: _Batch, chains: _Chains, path_probs: FloatArray, rows: IntArray
    ) -> BoolArray:
        """Take a level of all chains; go on with all if the next level is predicted to raise
        goodput, else with none.

        See :class:`~hf_slospec.engine.interfaces.Plan`.
        """
        return np.full(len(rows), self._raises_goodput(batch, chains, path_probs))

    def _raises_goodput(self, batch: _Batch, chains: _Chains, path_probs: FloatArray) -> bool:
        probs = path_probs[:, 0]
        before = chains.goodput
        chains.length = chains.length + 1
        chains.expected = chains.expected + float(probs.sum())
        chains.goodput = self._goodput(batch, chains.expected, chains.length)
        if chains.goodput < before:
            return False
        self._sum_confidence += float(
            (probs / np.maximum(chains.last_probs, np.finfo(np.float64).tiny)).sum()
        )
        self._num_confidences += len(probs)
        chains.last_probs = probs
        predicted = chains.expected + self.confidence * float(probs.sum())
        return self._goodput(batch, predicted, chains.length + 1) >= chains.goodput

    def _goodput(self, batch: _Batch, expected: float, length: int) -> float:
        """Return the expected tokens per second of chains of one length; -1 where the step exceeds
        the SLO.
        """
        num_nodes = batch.num_requests * (length + 1) + batch.num_prefill_tokens
        draft_s = self.costs.draft_s(batch.num_requests, length, 1, batch.num_keys)
        seconds = float(
            draft_s + self.costs.verify_s(num_nodes, batch.num_requests, batch.num_keys)
        )
        return -1.0 if length and seconds > batch.tightest_slo_s else expected / seconds

    def _pruned(self, batch: _Batch, forest: Forest) -> BoolArray:
        """Return the nodes to verify.  -> [num_nodes] bool, roots included"""
        is_whole: BoolArray = np.ones(len(forest.depths), dtype=np.bool_)
        is_kept = forest.depths == 0
        ranked = forest.canonical(forest.path_probs)
        is_kept[ranked[: max(smaller_size(len(is_whole)) - batch.num_requests, 0)]] = True

        def goodput(is_verified: BoolArray) -> float:
            return float(forest.path_probs[is_verified].sum()) / self._seconds(
                batch, forest, is_verified
            )

        return is_kept if goodput(is_kept) >= goodput(is_whole) else is_whole

    def _seconds(self, batch: _Batch, forest: Forest, is_verified: BoolArray) -> float:
        draft_s = self.costs.draft_s(
            batch.num_requests, int(forest.depths.max()), 1, batch.num_keys
        )
        num_tokens = int(np.count_nonzero(is_verified)) + batch.num_prefill_tokens
        return float(draft_s + self.costs.verify_s(num_tokens, batch.num_requests, batch.num_keys))


def smaller_size(num_tokens: int) -> int:
    """Return the largest size of a captured forward that is smaller than ``num_tokens``; 0 for a
    single token.
    """
    if num_tokens <= GRAPH_STEP:
        return 1 << ((num_tokens - 1).bit_length() - 1) if num_tokens > 1 else 0
    return (num_tokens - 1) // GRAPH_STEP * GRAPH_STEP
