"""SmartSpec (arXiv 2406.14066v2): chains, as long as goodput says; one length for all, or one per request."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.goodput import MovingAcceptance, best_length, chain_tokens
from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import FloatArray, IntArray, TokenTree
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Plan, Selection
from hf_slospec.engine.request import Request
from hf_slospec.policies.adaserve import useful, useful_depth

BIAS = 1.1  # of the released code: plain decoding is worth this much more than its forwards say


class SmartSpecPolicy:
    """Before every step, the one length that maximises expected tokens per second of all requests (Algorithm 2).

    The acceptance rate is a moving average over all requests. The request-level variant shares the same number of
    drafted tokens out by the requests' own acceptance (the released code): k_i = round(k n a_i / sum of a).
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts, by_request: bool = False):
        self.max_depth, self.costs, self.by_request = config.max_depth, costs, by_request
        self.acceptance = MovingAcceptance()
        self.own: WeakKeyDictionary[Request, MovingAcceptance] = WeakKeyDictionary()

    def plan(self, requests: Sequence[Request], begun_s: float, num_fed: int = 0) -> Plan:
        num_requests, num_keys = len(requests), sum(len(request.tokens) for request in requests)

        def seconds(lengths: IntArray) -> FloatArray:
            draft_s = self.costs.draft_s(num_requests, lengths, 1, num_keys)
            return draft_s + self.costs.verify_s(num_requests * (lengths + 1) + num_fed, num_requests, num_keys)

        def tokens(lengths: IntArray) -> FloatArray:
            return chain_tokens(self.acceptance.rate, lengths)

        length = best_length(tokens, seconds, useful_depth(requests, self.max_depth), BIAS)
        self._lengths = self._shared_out(requests, length)
        self._step_s = float(seconds(np.array([length]))[0])
        return Plan(max(self._lengths), 1)

    def _shared_out(self, requests: Sequence[Request], length: int) -> list[int]:
        if not self.by_request or not length:
            return [length] * len(requests)
        rates = np.array(
            [self.own[request].rate if request in self.own else MovingAcceptance.START for request in requests]
        )
        shares = np.rint(length * len(requests) * rates / rates.sum()).astype(int)
        most = useful_depth(requests, self.max_depth)
        return [min(int(share), most) for share in shares]

    def select(self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan) -> Selection:
        trees = [tree.up_to(k) for tree, k in zip(useful(requests, candidates), self._lengths, strict=True)]
        self._trees = trees
        expected = [float(chain_tokens(self.acceptance.rate, tree.max_depth)) for tree in trees]
        return Selection(trees, expected, self._step_s)

    def observe(self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes) -> None:
        tried = [min(len(nodes) + 1, tree.max_depth) for nodes, tree in zip(accepted, self._trees, strict=True)]
        self.acceptance.observe(sum(tried), sum(len(nodes) for nodes in accepted))
        for request, own_tried, nodes in zip(requests, tried, accepted, strict=True):
            self.own.setdefault(request, MovingAcceptance()).observe(own_tried, len(nodes))
