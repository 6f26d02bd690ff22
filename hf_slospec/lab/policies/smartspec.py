"""SmartSpec (arXiv 2406.14066v2): chains whose length maximises goodput, one for all requests or one per request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from pydantic import Field

from hf_slospec.algo.tree import BoolArray, FloatArray, IntArray, TokenTree
from hf_slospec.engine.protocols import Plan, PolicyStep, Selection
from hf_slospec.engine.request import Request
from hf_slospec.engine.step_times import StepCosts
from hf_slospec.lab.policies.goodput import MovingAcceptance, best_length, chain_tokens
from hf_slospec.policies.registry import NamedPolicy, PolicyOptions
from hf_slospec.policies.settings import PolicySettings

BIAS = 1.1  # factor on the goodput of plain decoding, for costs besides the forwards, as in the released code
RECENT = 100  # steps that decide whether to draft for new requests
RETRY = 20  # consecutive steps without drafts, of which the last one tries to draft again


class SmartSpecOptions(PolicyOptions):
    """Settings of ``smartspec`` and ``smartspec-requests``."""

    prefill_disabling: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Requests that arrive while more than this share of the last 100 steps drafted nothing are never "
        "drafted for, which saves the draft's prefill. 1: all requests are drafted for.",
    )


@dataclass(frozen=True)
class Batch:
    """Requests of one step."""

    requests: Sequence[Request]
    begun_s: float
    num_prefill_tokens: int
    num_keys: int  # cached tokens of all requests
    useful: IntArray  # [num_requests] int64, maximum useful lengths; a chain of k tokens commits up to k + 1


@dataclass(frozen=True)
class Chains:
    """Lengths of chains, and the time of a step with them."""

    lengths: IntArray  # [num_requests] int64, tokens
    step_s: float = 0.0  # predicted seconds; 0: not known yet


class SmartSpecPolicy(NamedPolicy):
    """Policy that drafts chains of the length with most expected tokens per second over all requests (Algorithm 2).

    The acceptance rate is a moving average over all requests.

    Retry: [FIX] nothing is learned where nothing is drafted, so as printed and released, speculation that was switched
    off by low acceptance stays off as long as the batch does. Here every :data:`RETRY`-th consecutive step without
    drafts takes the length that would be best at the initial acceptance rate, which is 0 if the batch is too large.

    Prefill disabling: requests that arrive while most recent steps drafted nothing are never drafted for, which saves
    the draft's prefill. [FIX] a step counts by the length that is best if all requests are drafted for; otherwise
    drafting would never resume once no request is drafted for.
    """

    name = "smartspec"
    options: ClassVar[type[PolicyOptions]] = SmartSpecOptions
    min_confidence = 0.0  # drafting stops after a less probable token

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        self.prefill_disabling = config.options_of(SmartSpecOptions).prefill_disabling
        self.acceptance = MovingAcceptance()
        self.acceptances: WeakKeyDictionary[Request, MovingAcceptance] = WeakKeyDictionary()  # per request
        self.undrafted: WeakSet[Request] = WeakSet()  # requests that are never drafted for
        self._seen: WeakSet[Request] = WeakSet()
        self._was_plain: deque[bool] = deque(maxlen=RECENT)
        self._num_plain = 0  # consecutive steps without drafts, though some could have been used

    def step(self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0) -> PolicyStep:
        self._decide_on_new(requests)
        num_keys = sum(len(request.tokens) for request in requests)
        useful = np.array([min(self.config.max_depth, request.num_left - 1) for request in requests])
        batch = Batch(requests, begun_s, num_prefill_tokens, num_keys, useful)
        chains = self._to_draft(batch)
        drafting = [request for request, length in zip(requests, chains.lengths, strict=True) if length]
        planned = Plan(int(chains.lengths.max()), 1, min_confidence=self.min_confidence, drafting=drafting)
        candidates, plan = yield planned
        chains = self._to_verify(batch, chains, candidates, plan)
        trees = [tree.up_to(length) for tree, length in zip(candidates, chains.lengths.tolist(), strict=True)]
        expected = [float(chain_tokens(self.acceptance.rate, tree.max_depth)) for tree in trees]
        accepted, _ = yield Selection(trees, expected, chains.step_s)
        tried = [min(len(nodes) + 1, tree.max_depth) for nodes, tree in zip(accepted, trees, strict=True)]
        self.acceptance.observe(sum(tried), sum(len(nodes) for nodes in accepted))
        for request, num_tried, nodes in zip(requests, tried, accepted, strict=True):
            self.acceptances.setdefault(request, MovingAcceptance()).observe(num_tried, len(nodes))

    def _to_draft(self, batch: Batch) -> Chains:
        """Return the chains to draft."""
        useful = batch.useful
        length, step_s = self._best(batch, useful)
        self._was_plain.append(length == 0 and bool(useful.any()))
        is_drafted = np.array([request not in self.undrafted for request in batch.requests])
        if not is_drafted.all():
            useful = useful * is_drafted
            length, step_s = self._best(batch, useful)
        if useful.any():
            self._num_plain = 0 if length else self._num_plain + 1
            if self._num_plain and self._num_plain % RETRY == 0:
                length, step_s = self._best(batch, useful, rate=MovingAcceptance.START)
        lengths: IntArray = np.minimum(self._lengths(batch.requests, length, useful > 0), useful)
        return Chains(lengths, step_s)

    def _to_verify(self, batch: Batch, drafted: Chains, candidates: Sequence[TokenTree], plan: Plan) -> Chains:
        """Return the chains to verify, parts of the candidates that were drafted by the plan."""
        return drafted

    def _lengths(self, requests: Sequence[Request], length: int, is_drafted: BoolArray) -> IntArray:
        """Return the lengths of all chains, given the best common length, useful or not.  -> [num_requests] int64"""
        return np.full(len(requests), length)

    def _decide_on_new(self, requests: Sequence[Request]) -> None:
        """Choose for new requests whether they are drafted for."""
        new = [request for request in requests if request not in self._seen]
        if new and self._is_drafting_costly() and self._is_disabled(len(requests)):
            self.undrafted.update(new)
        self._seen.update(new)

    def _is_disabled(self, num_requests: int) -> bool:
        """Return whether new requests should never be drafted for."""
        share = sum(self._was_plain) / max(len(self._was_plain), 1)
        return share > self.prefill_disabling

    def _is_drafting_costly(self) -> bool:
        """Return whether there is a draft model; without one, no prefill is saved by not drafting."""
        return float(self.costs.draft_s(1, 1, 1)) > 0.0

    def _best(
        self, batch: Batch, proposed: IntArray, drafted_s: float | None = None, rate: float | None = None
    ) -> tuple[int, float]:
        """Return the common length limit with the highest goodput, and the predicted seconds of its step.

        Args:
            batch: the requests.
            proposed: [num_requests] int64, maximum tokens to propose; requests without any still commit one token.
            drafted_s: seconds that drafting has taken; None: drafting is still to come, and depends on the length.
            rate: acceptance rate to assume; None: the observed one.
        """
        rate = self.acceptance.rate if rate is None else rate
        num_requests, num_drafting = len(proposed), max(int(np.count_nonzero(proposed)), 1)

        def verified(lengths: IntArray) -> IntArray:
            each: IntArray = np.minimum(proposed[:, None], lengths)  # [num_requests, lengths]
            return each

        def tokens(lengths: IntArray) -> FloatArray:
            total: FloatArray = chain_tokens(rate, verified(lengths)).sum(axis=0)
            return total

        def seconds(lengths: IntArray) -> FloatArray:
            draft_s = self.costs.draft_s(num_drafting, lengths, 1, batch.num_keys) if drafted_s is None else drafted_s
            num_nodes = (verified(lengths) + 1).sum(axis=0)
            return draft_s + self.costs.verify_s(num_nodes + batch.num_prefill_tokens, num_requests, batch.num_keys)

        length = best_length(tokens, seconds, int(proposed.max()), BIAS)
        return length, float(seconds(np.array([length]))[0])


class SmartSpecRequestsPolicy(SmartSpecPolicy):
    """Policy that distributes the drafted tokens of ``smartspec`` by each request's acceptance (the released code).

    k_i = round(k n a_i / sum of a).
    """

    name = "smartspec-requests"

    def _lengths(self, requests: Sequence[Request], length: int, is_drafted: BoolArray) -> IntArray:
        if not length:
            return super()._lengths(requests, length, is_drafted)
        rates = np.array([self.acceptances.get(request, MovingAcceptance()).rate for request in requests])
        share = rates * is_drafted / rates[is_drafted].sum()
        lengths: IntArray = np.rint(length * np.count_nonzero(is_drafted) * share).astype(np.int64)
        return lengths
