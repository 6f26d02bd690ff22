"""Limits of an engine, K/V slots that requests need, and the order in which they are preempted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hf_slospec.engine.costs import StepCosts
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request


@dataclass(frozen=True)
class Limits:
    """Limits that the scheduler of one engine keeps."""

    max_batch: int  # maximum number of running requests
    kv_tokens: int  # K/V slots of all running requests together
    max_nodes: int  # maximum nodes of one request's draft tree
    prefill_chunk: int  # maximum prefill tokens of a step
    starvation_s: float  # seconds after which a waiting request, guaranteed or not, goes first

    def kv_needed(self, params: RequestParams) -> int:
        """Return the K/V slots of a request at its maximum length, with the largest draft tree."""
        return params.max_len + self.max_nodes


class Slots:
    """Base class of the scheduler that computes how many K/V slots requests need, now and later."""

    def __init__(self, limits: Limits, costs: StepCosts):
        self.limits = limits
        self.costs = costs
        self.running: list[Request] = []
        self.output_tokens = 100.0  # average output tokens of requests that finished recently

    @property
    def kv_held(self) -> int:
        """Number of tokens of all running requests, whose K/V is cached or computed next."""
        return sum(len(request.tokens) for request in self.running)

    @property
    def _num_nodes(self) -> int:
        """K/V slots reserved for one request's draft tree: the average number of nodes that recent
        steps verified per request, at most ``max_nodes``.

        If speculation does not pay, requests need no slots for trees, so more of them can run
        together."""
        return min(math.ceil(self.costs.recent.nodes) - 1, self.limits.max_nodes)

    def _kv_needed(self, request: Request) -> int:
        """Return the K/V slots that a request needs at its maximum length, including those for its
        draft tree.
        """
        return request.params.max_len + self._num_nodes

    def _expected(self, requests: Collection[Request]) -> int:
        """Return the K/V slots with which requests are admitted: those that they need once each has
        emitted the average output of recent requests, or what the next step may emit if that is
        more.

        Each time that a request was preempted doubles the tokens that it is expected to emit.
        """
        num_tokens = max(math.ceil(self.output_tokens), self.limits.max_nodes)
        return self._kv_after(requests, lambda request: num_tokens << request.stats.num_preempted)

    def _after_step(self, requests: Collection[Request]) -> int:
        """Return the K/V slots that requests need after the next step, whose bonus token has no K/V
        yet.
        """
        return self._kv_after(requests, lambda _: self.limits.max_nodes)

    def _kv_after(self, requests: Collection[Request], num_tokens: Callable[[Request], int]) -> int:
        """Return the K/V slots that requests need after ``num_tokens(request)`` more tokens of
        each; guaranteed requests count with their maximum length.
        """
        lengths = (
            request.params.max_len
            if request.is_guaranteed
            else min(len(request.tokens) + num_tokens(request), request.params.max_len)
            for request in requests
        )
        return sum(lengths) + len(requests) * self._num_nodes


def in_order_of_preemption(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order in which they are preempted: the least important priority first,
    and within a priority the last to arrive.
    """
    return sorted(
        requests,
        key=lambda request: (-request.params.priority, -request.stats.arrived_s, -request.index),
    )
