"""SmartSpec (arXiv 2406.14066v2): chains, as long as goodput says; one length for all, or one per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import BoolArray, FloatArray, IntArray, TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.papers.goodput import MovingAcceptance, best_length, chain_tokens

BIAS = 1.1  # of the released code: plain decoding is worth this much more than its forwards say
RECENT = 100  # steps that tell whether to draft for new requests


class SmartSpecPolicy:
    """Before every step, the one length that maximises expected tokens per second of all requests (Algorithm 2).

    The acceptance rate is a moving average over all requests. The request-level variant shares the same number of
    drafted tokens out by the requests' own acceptance (the released code): k_i = round(k n a_i / sum of a).

    Prefill disabling: requests that come while most recent steps drafted nothing are never drafted for, which saves
    the draft their prompts. [FIX] what counts is the length that would have been best with everybody drafted for:
    once nobody is, nothing would ever be drafted again.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, by_request: bool = False):
        self.config, self.costs, self.by_request = config, costs, by_request
        self.acceptance = MovingAcceptance()
        self.own: WeakKeyDictionary[Request, MovingAcceptance] = WeakKeyDictionary()
        self.undrafted: WeakSet[Request] = WeakSet()  # requests that are never drafted for
        self._seen: WeakSet[Request] = WeakSet()
        self._was_plain: deque[bool] = deque(maxlen=RECENT)
        self._step_s = 0.0

    def plan(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> Plan:
        self._look_at(requests, num_prefill_tokens)
        useful = self._useful(requests)
        is_drafted = np.array([request not in self.undrafted for request in requests])
        length = self._best_length(useful)
        self._was_plain.append(length == 0 and bool(useful.any()))
        if not is_drafted.all():
            length = self._best_length(useful * is_drafted)
        return self._planned(requests, self._shared_out(requests, length, useful * is_drafted))

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        return self._verified(candidates, self._lengths)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        tried = [min(len(nodes) + 1, tree.max_depth) for nodes, tree in zip(accepted, self._trees, strict=True)]
        self.acceptance.observe(sum(tried), sum(len(nodes) for nodes in accepted))
        for request, own_tried, nodes in zip(requests, tried, accepted, strict=True):
            self.own.setdefault(request, MovingAcceptance()).observe(own_tried, len(nodes))

    def _look_at(self, requests: Sequence[Request], num_prefill_tokens: int) -> None:
        """Take in who is there, and decide about those who are new."""
        self._num_keys, self._num_fed = sum(len(request.tokens) for request in requests), num_prefill_tokens
        new = [request for request in requests if request not in self._seen]
        if new and self._drafting_costs() and self._is_pointless(len(requests)):
            self.undrafted.update(new)
        self._seen.update(new)

    def _is_pointless(self, num_requests: int) -> bool:
        """Whether new requests should never be drafted for."""
        share = sum(self._was_plain) / max(len(self._was_plain), 1)
        return share > self.config.prefill_disabling

    def _drafting_costs(self) -> bool:
        """Whether there is a draft model; else nothing is saved by not drafting."""
        return float(self.costs.draft_s(1, 1, 1)) > 0.0

    def _useful(self, requests: Sequence[Request]) -> IntArray:
        """The longest chain worth drafting for each: one of k tokens commits up to k + 1.  -> [num_requests]"""
        return np.array([min(self.config.max_depth, request.num_left - 1) for request in requests])

    def _best_length(self, proposed: IntArray, drafted_s: float | None = None) -> int:
        """The length to which verifying what each request proposes has the highest goodput; sets the step's seconds.

        Args:
            proposed: [num_requests] tokens each can propose; those with none count for the token they get anyway.
            drafted_s: what drafting took, if it is over.
        """
        num_requests, num_drafting = len(proposed), max(int(np.count_nonzero(proposed)), 1)

        def verified(lengths: IntArray) -> IntArray:
            each: IntArray = np.minimum(proposed[:, None], lengths)  # [num_requests, lengths]
            return each

        def tokens(lengths: IntArray) -> FloatArray:
            total: FloatArray = chain_tokens(self.acceptance.rate, verified(lengths)).sum(axis=0)
            return total

        def seconds(lengths: IntArray) -> FloatArray:
            draft_s = self.costs.draft_s(num_drafting, lengths, 1, self._num_keys) if drafted_s is None else drafted_s
            num_nodes = (verified(lengths) + 1).sum(axis=0)
            return draft_s + self.costs.verify_s(num_nodes + self._num_fed, num_requests, self._num_keys)

        length = best_length(tokens, seconds, int(proposed.max()), BIAS)
        self._step_s = float(seconds(np.array([length]))[0])
        return length

    def _shared_out(self, requests: Sequence[Request], length: int, useful: IntArray) -> IntArray:
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

    def _planned(self, requests: Sequence[Request], lengths: IntArray, min_confidence: float = 0.0) -> Plan:
        """Chains of these lengths."""
        self._lengths = lengths
        drafting = [request for request, length in zip(requests, lengths, strict=True) if length]
        return Plan(int(lengths.max()), 1, min_confidence=min_confidence, drafting=drafting)

    def _verified(self, candidates: Sequence[TokenTree], lengths: IntArray) -> Selection:
        self._trees = [tree.up_to(length) for tree, length in zip(candidates, lengths.tolist(), strict=True)]
        expected = [float(chain_tokens(self.acceptance.rate, tree.max_depth)) for tree in self._trees]
        return Selection(self._trees, expected, self._step_s)
