"""Variants of SmartSpec: its confidence-based drafting (Algorithm 3), its trees of heads, and
TurboSpec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from hf_slospec.engine.acceptance import tried_and_hit
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.lab.policies.goodput import (
    MovingAcceptance,
    confident_length,
    heads_nodes,
    heads_shapes,
    heads_tokens,
)
from hf_slospec.lab.policies.sequoia import StaticTree, trees_within
from hf_slospec.lab.policies.smartspec import BIAS, Batch, SmartSpecPolicy
from hf_slospec.policies.registry import (
    NamedPolicy,
    PolicyOptions,
    max_useful_depth,
)
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import Forest, IntArray, TokenTree


class ConfidenceOptions(PolicyOptions):
    """Settings of ``smartspec-confidence``."""

    min_confidence: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="A token with at most this probability is the last one drafted.",
    )


class ConfidencePolicy(SmartSpecPolicy):
    """Policy that drafts until a token is no more probable than a threshold, and then verifies
    chains up to the common length with the highest goodput.

    [FIX] The printed loop drafts one token too many, and verifies only chains that never stopped:
    here the proposed tokens of all requests are verified, up to the common length. As printed,
    drafting is never turned off.

    Requests that have stopped leave the draft's batch in the simulator and on a CPU. Other devices
    draft for all requests until the last one stops, and drop the tokens drafted after a stop.
    """

    name = "smartspec-confidence"
    options = ConfidenceOptions
    chooses_requests = False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.min_confidence = config.options_of(ConfidenceOptions).min_confidence

    def _to_draft(self, batch: Batch) -> IntArray:
        return batch.useful

    def _to_verify(self, candidates: Sequence[TokenTree]) -> IntArray:
        # Not all drafters stop for single requests, so chains are cut here.
        confident = [confident_length(tree, self.min_confidence) for tree in candidates]
        proposed: IntArray = np.minimum(confident, self._drafted)
        levels = np.array([[tree.max_depth] for tree in candidates])
        draft_s = float(self._draft_s(self._batch, levels)[0, 0])
        length, self._predicted_s = self._best(self._batch, proposed, draft_s)
        return np.minimum(proposed, length)


MAX_WIDTH = 8  # nodes per tree level; bounds the number of tree shapes that are compared


class HeadsPolicy(NamedPolicy):
    """Policy that drafts trees in which every node of level j - 1 has k_j children, with the widths
    k_1, k_2, ... that give the most expected tokens per second, or no tree.

    A tree level stands for a draft head. As in the paper, the candidates of a head are assumed to
    be independent, each accepted at the head's rate; the rates are moving averages over the
    candidates that were tried at that depth."""

    name = "smartspec-tree"

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.max_width = min(config.max_width, MAX_WIDTH)
        self.acceptances = [MovingAcceptance() for _ in range(config.max_depth)]

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        shapes = heads_shapes(max_useful_depth(requests, self.config.max_depth), self.max_width)
        rates = [acceptance.rate for acceptance in self.acceptances[: shapes.shape[1]]]
        depths = (shapes > 0).sum(axis=1)
        widths = np.cumprod(np.maximum(shapes, 1), axis=1).max(axis=1, initial=1)
        num_tokens = len(requests) * heads_nodes(shapes) + num_prefill_tokens
        seconds = self.costs.shape_s(requests, depths, widths, num_tokens)
        goodput = heads_tokens(rates, shapes) / seconds
        goodput[0] *= BIAS  # the first shape is a lone root: plain decoding
        best = int(np.argmax(goodput))
        depth = int(depths[best])
        best_widths = shapes[best].tolist()
        # Expected tokens by the depth of a request's tree
        self._expected = [
            float(heads_tokens(rates[:end], best_widths[:end])) for end in range(depth + 1)
        ]
        self._shape = StaticTree.of_expansion(best_widths[:depth])
        self._step_s = float(seconds[best])
        return Plan(depth, int(widths[best]))

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        self._trees = trees_within(self._shape, requests, candidates)
        expected = [self._expected[tree.max_depth] for tree in self._trees]
        return Selection(self._trees, expected, self._step_s)

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        forest = Forest.of(self._trees)
        was_tried, was_hit = tried_and_hit(forest, forest.indices(accepted))
        num_levels = len(self.acceptances) + 1
        tried, hits = (
            np.bincount(forest.depths[nodes], minlength=num_levels)
            for nodes in (was_tried, was_hit)
        )
        for acceptance, num_tried, num_hits in zip(
            self.acceptances, tried[1:], hits[1:], strict=True
        ):
            acceptance.observe(int(num_tried), int(num_hits))


# Constants of the released code.
RESET = 100  # after so many new requests in too large batches, all batch sizes are tried again
PROPOSED = 8  # tokens proposed per request if drafting costs nothing
# With prompt lookup: after TRIES consecutive steps that verify no proposal, nothing is proposed for
# PAUSE steps
TRIES = 40
PAUSE = 60


class TurboSpecPolicy(SmartSpecPolicy):
    """Policy of Listing 1, corrected, with SmartSpec's choice of the length.

    With a draft model, a step whose best length is 0 sets a limit: new requests in a larger batch
    are never drafted for. After ``RESET`` such requests all batch sizes are tried again. [FIX] the
    printed condition on the method is inverted: it is the draft model that has prompts to prefill.
    [FIX] the limit is also lifted by a step that drafts with a batch of at least this size; as
    printed, a single request whose drafts fail once sets a limit of 1.

    With prompt lookup, drafting is free and proposals differ in length, down to none. So as many
    tokens as possible are proposed, and goodput decides how many of them are verified.
    """

    name = "turbospec"
    options = PolicyOptions
    chooses_requests = False

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.off_size = math.inf  # size of the last batch for which not drafting was best
        self._num_skipped = 0
        # Consecutive steps that verified none of the proposals, pauses included
        self._num_unused = 0

    def _to_draft(self, batch: Batch) -> IntArray:
        if self._is_drafting_costly():
            lengths = super()._to_draft(batch)
            if self._was_plain[-1]:
                self.off_size = len(batch.requests)
            elif lengths.any() and len(batch.requests) >= self.off_size:
                self.off_size = math.inf
            return lengths
        if self._num_unused >= TRIES:
            self._num_unused = (self._num_unused + 1) % (TRIES + PAUSE)
            return np.zeros_like(batch.useful)
        return np.minimum(PROPOSED, batch.useful)

    def _to_verify(self, candidates: Sequence[TokenTree]) -> IntArray:
        drafted = self._drafted
        if self._is_drafting_costly():
            return drafted
        proposed = np.array([tree.max_depth for tree in candidates])
        length, self._predicted_s = self._best(
            self._batch, np.minimum(proposed, drafted), drafted_s=0.0
        )
        if drafted.any():
            self._num_unused = 0 if length else self._num_unused + 1
        return np.minimum(length, drafted)

    def _is_disabled(self, num_requests: int) -> bool:
        if num_requests <= self.off_size:
            return False
        self._num_skipped += 1
        if self._num_skipped % RESET == 0:
            self.off_size = math.inf
        return True
