"""SmartSpec (arXiv 2406.14066v2): chains whose length maximises goodput, one for all requests or
one per request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from pydantic import Field

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Plan, Selection
from hf_slospec.lab.policies.goodput import MovingAcceptance, best_batch, chain_tokens
from hf_slospec.policies.registry import NamedPolicy, PolicyOptions
from hf_slospec.policies.settings import PolicySettings
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray, TokenTree

# Factor on the goodput of plain decoding, for costs besides the forwards, as in the released code
BIAS = 1.1
RECENT = 100  # steps that decide whether to draft for new requests
RETRY = 20  # every so many consecutive steps without drafts, one step tries to draft again


class SmartSpecOptions(PolicyOptions):
    """Settings of ``smartspec`` and ``smartspec-requests``."""

    prefill_disabling: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Requests that arrive while more than this share of the last 100 steps "
        "drafted nothing are never drafted for, which saves the draft's prefill. 1: all requests "
        "are drafted for.",
    )


@dataclass(frozen=True)
class Batch:
    """Requests of one step."""

    requests: Sequence[Request]
    begun_s: float
    num_prefill_tokens: int
    keys: IntArray  # [num_requests] int64, cached tokens
    # [num_requests] int64, maximum useful chain lengths; a chain of k tokens commits up to k + 1
    useful: IntArray
    # K/V slots minus cached tokens of all decoding requests, including those that skip the step
    slots_left: float

    @property
    def num_keys(self) -> int:
        """Cached tokens of all requests."""
        return int(self.keys.sum())

    def part(self, indices: Sequence[int]) -> Batch:
        """Return the batch of the requests at these indices."""
        requests = [self.requests[index] for index in indices]
        return replace(
            self, requests=requests, keys=self.keys[indices], useful=self.useful[indices]
        )


Add = Callable[[Any], Any]  # [num_requests, ...] array -> sums over requests


def _sum(values: Any) -> Any:
    """Return the sum over all requests.  -> [1, ...]"""
    return values.sum(axis=0, keepdims=True)


def _prefix_sums(values: Any) -> Any:
    """Return the sums over the first one, two, ... requests.  -> [num_requests, ...]"""
    return np.cumsum(values, axis=0)


class SmartSpecPolicy(NamedPolicy):
    """Policy that runs the requests that arrived first, with chains of one common length; it
    chooses the number of requests and the length that maximise goodput (Algorithm 2).

    Goodput is the expected tokens per second of the requests that run; all other requests skip the
    step. The acceptance rate is a moving average over all requests. The cost of a draft level
    depends on the number of requests that draft it (equation 5).

    K/V slots: a batch needs slots for all cached tokens and for the tokens that it drafts. Plain
    decoding always has enough, as the scheduler preempts requests before the step.

    Retry: [FIX] acceptance is measured only where tokens are drafted, so as printed and released,
    speculation that was switched off by low acceptance stays off as long as the batch does. Here
    every :data:`RETRY`-th consecutive step without drafts takes the length that would be best at
    the initial acceptance rate, which is 0 if the batch is too large.

    Prefill disabling: requests that arrive while most recent steps drafted nothing are never
    drafted for, which saves the draft's prefill. [FIX] a step counts as drafting nothing if length
    0 would be best with drafts for all requests; otherwise drafting would never resume once no
    request is drafted for.
    """

    name = "smartspec"
    options: ClassVar[type[PolicyOptions]] = SmartSpecOptions
    min_confidence = 0.0  # drafting for a request stops after a less probable token
    chooses_requests = True

    def __init__(self, config: PolicySettings, costs: StepCosts):
        super().__init__(config, costs)
        kv_tokens = config.kv_tokens if isinstance(config, SLOSpecConfig) else None
        self.kv_tokens = math.inf if kv_tokens is None else kv_tokens
        self.prefill_disabling = config.options_of(SmartSpecOptions).prefill_disabling
        self.acceptance = MovingAcceptance()
        # Acceptance rate of each request
        self.acceptances: WeakKeyDictionary[Request, MovingAcceptance] = WeakKeyDictionary()
        self.undrafted: WeakSet[Request] = WeakSet()  # requests that are never drafted for
        self._seen: WeakSet[Request] = WeakSet()
        self._was_plain: deque[bool] = deque(maxlen=RECENT)
        self._num_plain = 0  # consecutive steps without drafts, though drafts could be used

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        self._decide_on_new(requests)
        keys = np.array([len(request.tokens) for request in requests])
        useful = np.array(
            [min(self.config.max_depth, request.num_left - 1) for request in requests]
        )
        slots_left = self.kv_tokens - float(keys.sum())
        batch = Batch(requests, begun_s, num_prefill_tokens, keys, useful, slots_left)
        self._batch = batch = self._running(batch)
        self._drafted = drafted = self._to_draft(batch)
        pairs = zip(batch.requests, drafted.tolist(), strict=True)
        depths = {request: length for request, length in pairs if length}
        return Plan(
            int(drafted.max()),
            1,
            min_confidence=self.min_confidence,
            drafting=list(depths),
            depths=depths,
            decoding=batch.requests,
        )

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        pairs = zip(candidates, self._to_verify(candidates).tolist(), strict=True)
        self._trees = [tree.up_to(length) for tree, length in pairs]
        expected = [float(chain_tokens(self.acceptance.rate, t.max_depth)) for t in self._trees]
        return Selection(self._trees, expected, self._predicted_s)

    def observe(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        phases: PhaseTimes,
        plan: Plan,
    ) -> None:
        pairs = zip(accepted, self._trees, strict=True)
        tried = [min(len(nodes) + 1, tree.max_depth) for nodes, tree in pairs]
        self.acceptance.observe(sum(tried), sum(len(nodes) for nodes in accepted))
        for request, num_tried, nodes in zip(requests, tried, accepted, strict=True):
            self.acceptances.setdefault(request, MovingAcceptance()).observe(num_tried, len(nodes))

    def _running(self, batch: Batch) -> Batch:
        """Return the batch of the requests that run in this step, in their original order."""
        if not self.chooses_requests:
            return batch
        arrivals = [(request.stats.arrived_s, request.index) for request in batch.requests]
        order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        queue = batch.part(order)
        useful = queue.useful * self._is_drafted(queue)
        lengths = _up_to(useful)
        tokens = _prefix_sums(chain_tokens(self.acceptance.rate, lengths))
        last, _ = best_batch(
            tokens, self._step_s(queue, lengths, add=_prefix_sums), _has_slots(queue, lengths), BIAS
        )
        return batch.part(sorted(order[: last + 1]))

    def _is_drafted(self, batch: Batch) -> BoolArray:
        """Return which requests may be drafted for.  -> [num_requests] bool"""
        return np.array([request not in self.undrafted for request in batch.requests])

    def _to_draft(self, batch: Batch) -> IntArray:
        """Return the lengths of the chains to draft, and predict the step's seconds if all of them
        will be verified.  -> [num_requests] int64
        """
        useful = batch.useful
        length, _ = self._best(batch, useful)
        self._was_plain.append(length == 0 and bool(useful.any()))
        is_drafted = self._is_drafted(batch)
        if not is_drafted.all():
            useful = useful * is_drafted
            length, _ = self._best(batch, useful)
        if useful.any():
            self._num_plain = 0 if length else self._num_plain + 1
            if self._num_plain and self._num_plain % RETRY == 0:
                length, _ = self._best(batch, useful, rate=MovingAcceptance.START)
        lengths: IntArray = np.minimum(self._lengths(batch.requests, length, useful > 0), useful)
        self._predicted_s = float(self._step_s(batch, lengths[:, None])[0, 0])
        return lengths

    def _to_verify(self, candidates: Sequence[TokenTree]) -> IntArray:
        """Return the length to which each candidate is verified.  -> [num_requests] int64"""
        return self._drafted

    def _lengths(self, requests: Sequence[Request], length: int, is_drafted: BoolArray) -> IntArray:
        """Return the length of every request's chain, given the best common length; it may exceed
        the request's useful length.  -> [num_requests] int64
        """
        return np.full(len(requests), length)

    def _decide_on_new(self, requests: Sequence[Request]) -> None:
        """Choose whether requests that are new in this step will ever be drafted for."""
        new = [request for request in requests if request not in self._seen]
        if new and self._is_drafting_costly() and self._is_disabled(len(requests)):
            self.undrafted.update(new)
        self._seen.update(new)

    def _is_disabled(self, num_requests: int) -> bool:
        """Return whether new requests should never be drafted for."""
        share = sum(self._was_plain) / max(len(self._was_plain), 1)
        return share > self.prefill_disabling

    def _is_drafting_costly(self) -> bool:
        """Return whether drafting takes time: with a draft model, but not with prompt lookup."""
        return float(self.costs.draft_s(1, 1, 1)) > 0.0

    def _best(
        self,
        batch: Batch,
        proposed: IntArray,
        drafted_s: float | None = None,
        rate: float | None = None,
    ) -> tuple[int, float]:
        """Return the common length limit with the highest goodput, and the predicted seconds of its
        step.

        Args:
            batch: the requests.
            proposed: [num_requests] int64, maximum tokens to propose; requests without any still
                commit one token.
            drafted_s: seconds that drafting has taken; None: drafting is still to come, and depends
                on the length.
            rate: acceptance rate to assume; None: the observed one.
        """
        lengths = _up_to(proposed)
        tokens = chain_tokens(self.acceptance.rate if rate is None else rate, lengths).sum(axis=0)
        seconds = self._step_s(batch, lengths, drafted_s)
        _, length = best_batch(tokens[None], seconds, _has_slots(batch, lengths)[-1:], BIAS)
        return length, float(seconds[0, length])

    def _step_s(
        self, batch: Batch, lengths: IntArray, drafted_s: float | None = None, add: Add = _sum
    ) -> FloatArray:
        """Return the predicted seconds of steps of the batch or, with prefix sums, of its first
        one, two, ... requests.

        Args:
            batch: the requests.
            lengths: [num_requests, options] int64, chain length of each request in each option.
            drafted_s: seconds that drafting has taken; None: predicted by :meth:`_draft_s`.
            add: :func:`_sum` or :func:`_prefix_sums`.

        Returns:
            [1 or num_requests, options] f64.
        """
        num_requests = add(np.ones((len(lengths), 1)))
        num_keys = add(batch.keys[:, None])
        num_tokens = add(lengths + 1) + batch.num_prefill_tokens
        draft_s = self._draft_s(batch, lengths, add) if drafted_s is None else drafted_s
        seconds: FloatArray = draft_s + self.costs.verify_s(num_tokens, num_requests, num_keys)
        return seconds

    def _draft_s(self, batch: Batch, lengths: IntArray, add: Add = _sum) -> FloatArray:
        """Return the predicted seconds of drafting in the steps of :meth:`_step_s`: summed over
        levels, the forward of the requests that draft the level (equation 5).
        """
        # [num_requests, options, levels]
        is_drafted = lengths[..., None] > np.arange(max(int(lengths.max()), 1))
        num_drafting = add(is_drafted)
        num_keys = add(is_drafted * batch.keys[:, None, None])
        first_s, both_s = (
            self.costs.draft_s(num_drafting, levels, 1, num_keys) for levels in (1, 2)
        )
        levels_s = both_s - first_s
        levels_s[..., 0] = first_s[..., 0]
        seconds: FloatArray = (levels_s * (num_drafting > 0)).sum(axis=-1)
        return seconds


def _up_to(longest: IntArray) -> IntArray:
    """Return every request's chain length under each common limit, from 0 to the largest useful
    one.  -> [num_requests, limits] int64

    Args:
        longest: [num_requests] int64, maximum length of each request.
    """
    return np.minimum(longest[:, None], np.arange(int(longest.max()) + 1))


def _has_slots(batch: Batch, lengths: IntArray) -> BoolArray:
    """Return whether K/V slots suffice for the chains of the first one, two, ... requests of the
    batch (the paper's HasSlot).

    Args:
        batch: the requests.
        lengths: [num_requests, limits] int64, with zeros in the first column.

    Returns:
        [num_requests, limits] bool.
    """
    has_slots: BoolArray = _prefix_sums(lengths + 1) <= batch.slots_left
    has_slots[:, 0] = True
    return has_slots


class SmartSpecRequestsPolicy(SmartSpecPolicy):
    """Policy that distributes the drafted tokens of ``smartspec`` by each request's acceptance (the
    released code).

    k_i = round(k n a_i / sum of a).
    """

    name = "smartspec-requests"

    def _lengths(self, requests: Sequence[Request], length: int, is_drafted: BoolArray) -> IntArray:
        if not length:
            return super()._lengths(requests, length, is_drafted)
        rates = np.array(
            [self.acceptances.get(request, MovingAcceptance()).rate for request in requests]
        )
        share = rates * is_drafted / rates[is_drafted].sum()
        lengths: IntArray = np.rint(length * np.count_nonzero(is_drafted) * share).astype(np.int64)
        return lengths
