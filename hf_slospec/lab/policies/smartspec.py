"""SmartSpec (arXiv 2406.14066v2): chains whose length maximises goodput, one for all requests or one per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from hf_slospec.algo.tree import BoolArray, FloatArray, IntArray, TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.lab.policies.goodput import MovingAcceptance, best_length, chain_tokens
from hf_slospec.lab.policies.options import SmartSpecOptions
from hf_slospec.policies.settings import PolicySettings

BIAS = 1.1  # of the released code: factor on the goodput of plain decoding, for costs beside the forwards
RECENT = 100  # steps that decide whether to draft for new requests


@dataclass
class ChainStep:
    """State of one step of a policy that drafts chains."""

    num_keys: int  # cached tokens of all requests
    num_prefill_tokens: int
    step_s: float = 0.0  # predicted
    lengths: IntArray = field(init=False)  # [num_requests] tokens to draft; set by plan
    trees: list[TokenTree] = field(init=False)  # verified chains; set by select


class SmartSpecPolicy:
    """Policy that drafts chains of the length with most expected tokens per second of all requests (Algorithm 2).

    The acceptance rate is a moving average over all requests. The request-level variant distributes the same number
    of drafted tokens by the requests' own acceptance (the released code): k_i = round(k n a_i / sum of a).

    Prefill disabling: requests that arrive while most recent steps drafted nothing are never drafted for, which saves
    the draft's prefill. [FIX] the length that counts is the best one if all requests were drafted for; otherwise
    drafting would never resume once no request is drafted for.
    """

    def __init__(self, config: PolicySettings, costs: StepCosts, by_request: bool = False):
        self.config, self.costs, self.by_request = config, costs, by_request
        self.prefill_disabling = config.options_of(SmartSpecOptions).prefill_disabling
        self.acceptance = MovingAcceptance()
        self.own: WeakKeyDictionary[Request, MovingAcceptance] = WeakKeyDictionary()
        self.undrafted: WeakSet[Request] = WeakSet()  # requests that are never drafted for
        self._seen: WeakSet[Request] = WeakSet()
        self._was_plain: deque[bool] = deque(maxlen=RECENT)

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        step = self._begin(requests, num_prefill_tokens)
        useful = self._useful_lengths(requests)
        is_drafted = np.array([request not in self.undrafted for request in requests])
        length = self._best_length(step, useful)
        self._was_plain.append(length == 0 and bool(useful.any()))
        if not is_drafted.all():
            length = self._best_length(step, useful * is_drafted)
        return self._planned(step, requests, self._distributed(requests, length, useful * is_drafted))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        step: ChainStep = plan.state
        return self._selected(step, candidates, step.lengths)

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes, plan: Plan
    ) -> None:
        step: ChainStep = plan.state
        tried = [min(len(nodes) + 1, tree.max_depth) for nodes, tree in zip(accepted, step.trees, strict=True)]
        self.acceptance.observe(sum(tried), sum(len(nodes) for nodes in accepted))
        for request, own_tried, nodes in zip(requests, tried, accepted, strict=True):
            self.own.setdefault(request, MovingAcceptance()).observe(own_tried, len(nodes))

    def _begin(self, requests: Sequence[Request], num_prefill_tokens: int) -> ChainStep:
        """Begin a step, and decide for new requests whether they are drafted for."""
        new = [request for request in requests if request not in self._seen]
        if new and self._is_drafting_costly() and self._is_disabled(len(requests)):
            self.undrafted.update(new)
        self._seen.update(new)
        return ChainStep(sum(len(request.tokens) for request in requests), num_prefill_tokens)

    def _is_disabled(self, num_requests: int) -> bool:
        """Return whether new requests should never be drafted for."""
        share = sum(self._was_plain) / max(len(self._was_plain), 1)
        return share > self.prefill_disabling

    def _is_drafting_costly(self) -> bool:
        """Return whether there is a draft model; without one, no prefill is saved by not drafting."""
        return float(self.costs.draft_s(1, 1, 1)) > 0.0

    def _useful_lengths(self, requests: Sequence[Request]) -> IntArray:
        """Return the longest useful chain of each request: one of k tokens commits up to k + 1.  -> [num_requests]"""
        return np.array([min(self.config.max_depth, request.num_left - 1) for request in requests])

    def _best_length(self, step: ChainStep, proposed: IntArray, drafted_s: float | None = None) -> int:
        """Return the common length limit with the highest goodput, and set the step's predicted seconds.

        Args:
            step: the step's state.
            proposed: [num_requests] tokens that can be proposed for each request; requests with none count for the
                token that they get in any case.
            drafted_s: seconds of drafting if it is over; None: drafting is still to be paid for.
        """
        num_requests, num_drafting = len(proposed), max(int(np.count_nonzero(proposed)), 1)

        def verified(lengths: IntArray) -> IntArray:
            each: IntArray = np.minimum(proposed[:, None], lengths)  # [num_requests, lengths]
            return each

        def tokens(lengths: IntArray) -> FloatArray:
            total: FloatArray = chain_tokens(self.acceptance.rate, verified(lengths)).sum(axis=0)
            return total

        def seconds(lengths: IntArray) -> FloatArray:
            draft_s = self.costs.draft_s(num_drafting, lengths, 1, step.num_keys) if drafted_s is None else drafted_s
            num_nodes = (verified(lengths) + 1).sum(axis=0)
            return draft_s + self.costs.verify_s(num_nodes + step.num_prefill_tokens, num_requests, step.num_keys)

        length = best_length(tokens, seconds, int(proposed.max()), BIAS)
        step.step_s = float(seconds(np.array([length]))[0])
        return length

    def _distributed(self, requests: Sequence[Request], length: int, useful: IntArray) -> IntArray:
        shares = np.full(len(requests), length)
        if self.by_request and length:
            shares = self._shares(requests, length, useful > 0)
        lengths: IntArray = np.minimum(shares, useful)
        return lengths

    def _shares(self, requests: Sequence[Request], length: int, is_drafted: BoolArray) -> IntArray:
        start = MovingAcceptance.START
        rates = np.array([self.own[request].rate if request in self.own else start for request in requests])
        share = rates * is_drafted / rates[is_drafted].sum()
        lengths: IntArray = np.rint(length * np.count_nonzero(is_drafted) * share).astype(np.int64)
        return lengths

    def _planned(
        self, step: ChainStep, requests: Sequence[Request], lengths: IntArray, min_confidence: float = 0.0
    ) -> Plan:
        """Return the plan to draft chains of these lengths."""
        step.lengths = lengths
        drafting = [request for request, length in zip(requests, lengths, strict=True) if length]
        return Plan(int(lengths.max()), 1, min_confidence=min_confidence, drafting=drafting, state=step)

    def _selected(self, step: ChainStep, candidates: Sequence[TokenTree], lengths: IntArray) -> Selection:
        """Return the selection of chains cut to these lengths."""
        step.trees = [tree.up_to(length) for tree, length in zip(candidates, lengths.tolist(), strict=True)]
        expected = [float(chain_tokens(self.acceptance.rate, tree.max_depth)) for tree in step.trees]
        return Selection(step.trees, expected, step.step_s)
