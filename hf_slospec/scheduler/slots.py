"""K/V slots that requests need, and the order in which they are preempted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hf_slospec.engine.costs import StepCosts
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request


@dataclass(frozen=True)
class Limits:
    """Resources of one engine."""

    max_batch: int  # running requests
    kv_tokens: int  # slots of K/V of all running requests
    max_nodes: int  # nodes of a request's draft tree
    prefill_chunk: int  # prefill tokens of a step
    starvation_s: float  # seconds after which a waiting request, guaranteed or not, goes first

    def kv_needed(self, params: RequestParams) -> int:
        """Return the slots of a request's K/V at its maximum length, with the largest draft tree."""
        return params.max_len + self.max_nodes


class Slots:
    """Slots that the requests of one engine need, now and later."""

    def __init__(self, limits: Limits, costs: StepCosts):
        self.limits = limits
        self.costs = costs
        self.running: list[Request] = []
        self.output_tokens = 100.0  # per request, averaged over those that finished recently

    @property
    def kv_held(self) -> int:
        """Tokens of running requests, whose K/V is held or computed next."""
        return sum(len(request.tokens) for request in self.running)

    @property
    def _num_nodes(self) -> int:
        """Slots for the nodes of a request: as many as recent steps verified.

        If speculation does not pay, requests need no slots for trees, so more of them can run
        together."""
        return min(math.ceil(self.costs.recent.nodes) - 1, self.limits.max_nodes)

    def _kv_needed(self, request: Request) -> int:
        """Return the slots of the request at its maximum length, and for its nodes."""
        return request.params.max_len + self._num_nodes

    def _expected(self, requests: Collection[Request]) -> int:
        """Return the slots of requests once each has emitted what is expected of it, at least what
        the next step may.

        Requests are admitted with these slots.
        """
        num_tokens = max(math.ceil(self.output_tokens), self.limits.max_nodes)
        return self._kv_after(requests, lambda request: num_tokens << request.stats.num_preempted)

    def _after_step(self, requests: Collection[Request]) -> int:
        """Return the slots of requests after the next step; the bonus token has no K/V yet."""
        return self._kv_after(requests, lambda _: self.limits.max_nodes)

    def _kv_after(self, requests: Collection[Request], num_tokens: Callable[[Request], int]) -> int:
        """Return the slots of requests after so many more tokens of each; guaranteed ones have
        their maximum length.
        """
        lengths = (
            request.params.max_len
            if request.is_guaranteed
            else min(len(request.tokens) + num_tokens(request), request.params.max_len)
            for request in requests
        )
        return sum(lengths) + len(requests) * self._num_nodes


def in_order_of_preemption(requests: Iterable[Request]) -> list[Request]:
    """Return requests with the least important first, and of these the last to arrive."""
    return sorted(
        requests,
        key=lambda request: (-request.params.priority, -request.stats.arrived_s, -request.index),
    )
