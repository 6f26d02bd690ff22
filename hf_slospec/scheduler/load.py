"""Load that each replica's engine reports, and the order in which a router offers a request to
replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.forks import cached_property
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from hf_slospec.scheduler.guarantees import MAX_STEP, first_token_slo_s, tightest_tpot_slo_s


def load_of(scheduler: ContinuousScheduler) -> ReplicaLoad:
    """Return the load of an engine, read from its scheduler between two steps; this takes no longer
    if many requests wait.
    """
    running = scheduler.running
    waiting = scheduler.waiting
    limits = scheduler.limits
    guaranteed = waiting.guaranteed + Counter(
        tightest_tpot_slo_s(r) for r in running if r.is_guaranteed
    )
    waiting_slots = waiting.max_len + len(waiting) * limits.max_nodes
    return ReplicaLoad(
        guaranteed=tuple(sorted(guaranteed.items())),
        best_effort=len(running) + len(waiting) - guaranteed.total(),
        prefill_tokens=waiting.num_tokens
        + sum(r.num_uncached for r in running if not r.is_decoding),
        kv_free=limits.kv_tokens - sum(limits.kv_needed(r.params) for r in running) - waiting_slots,
        step_s=scheduler.costs.step_curve(MAX_STEP),
        request_s=scheduler.costs.request_s,
        acceptance_length=scheduler.costs.recent.tokens,
        nodes=scheduler.costs.recent.nodes,
        draft_s=scheduler.costs.recent.draft_s,
        output_tokens=scheduler.output_tokens,
    )


def need_of(request: Request, limits: Limits) -> Need:
    """Return the prefill, K/V slots and SLOs that a request needs on a replica."""
    kv_tokens = limits.kv_needed(request.params)
    return Need(
        request.prompt_len, kv_tokens, tightest_tpot_slo_s(request), first_token_slo_s(request)
    )


# Exponent of the ratio of expected time to SLO; the larger it is, the less requests count that are
# far from missing their SLOs
POWER = 4.0
# For a request without SLOs, a replica that has the whole prompt's K/V cached counts as having this
# many fewer unfinished requests.
AFFINITY = 2.0
LEAST_S = 1e-6  # seconds; shorter SLOs count as this long
# Step times of a replica that has reported none: steps take no time
FREE = LatencyCurve((1,), (0.0,))


@dataclass(frozen=True)
class ReplicaLoad:
    """Load of one replica, as its engine reports it."""

    # TPOT SLO in seconds (inf: none) and number of unfinished guaranteed requests with it
    guaranteed: tuple[tuple[float, int], ...] = ()
    best_effort: int = 0  # unfinished requests without a guarantee
    # prompt tokens of unfinished requests that are still to be prefilled
    prefill_tokens: int = 0
    kv_free: int = 0  # K/V slots that no unfinished request holds or waits for
    # seconds of a step by its number of tokens, drafting and `request_s` excluded
    step_s: LatencyCurve = FREE
    request_s: float = 0.0  # seconds that each request adds to a step
    acceptance_length: float = 1.0  # recent average of tokens committed per request and step
    nodes: float = 1.0  # recent average of nodes verified per request and step, roots included
    draft_s: float = 0.0  # recent average of seconds of drafting in a step
    output_tokens: float = 100.0  # average output tokens of requests that finished recently

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests, with and without a guarantee."""
        return sum([count for _, count in self.guaranteed], self.best_effort)

    @cached_property
    def weight(self) -> float:
        """Sum of ``1 / SLO ** POWER`` over the guaranteed requests' TPOT SLOs."""
        return sum([count * _weight(tpot_slo_s) for tpot_slo_s, count in self.guaranteed])

    @cached_property
    def strain(self) -> float:
        """Sum of ``(expected TPOT / SLO) ** POWER`` over the guaranteed requests."""
        return float(self.weight * self.tpot_s**POWER)

    @property
    def tpot_s(self) -> float:
        """Expected seconds per output token.

        It is the time of a step divided by the tokens that the step commits for a request, plus the
        time of all pending prefill, which every request waits for, divided by the tokens of an
        output.
        """
        return self.decoding_s(self.num_requests) + self.prefill_s() / self.output_tokens

    @cached_property
    def next_decoding_s(self) -> float:
        """Expected seconds per output token with one more request, without the time of prefill."""
        return self.decoding_s(self.num_requests + 1)

    def prefill_s(self, more_tokens: int = 0) -> float:
        """Return the expected seconds of all pending prefill and of ``more_tokens`` further prompt
        tokens.
        """
        num_tokens = self.prefill_tokens + more_tokens
        return self.step_s(num_tokens) if num_tokens > 0 else 0.0

    def decoding_s(self, num_requests: int) -> float:
        """Return the expected seconds per output token of so many decoding requests."""
        if not num_requests:
            return 0.0
        tokens_s = self.step_s(num_requests * self.nodes)
        step_s = self.draft_s + self.request_s * num_requests + tokens_s
        return float(step_s / self.acceptance_length)

    def with_request(self, need: Need, is_guaranteed: bool) -> ReplicaLoad:
        """Return the load with one more request, which was sent to the replica after its report."""
        counts = dict(self.guaranteed)
        if is_guaranteed:
            counts[need.tpot_slo_s] = counts.get(need.tpot_slo_s, 0) + 1
        return replace(
            self,
            guaranteed=tuple(sorted(counts.items())),
            best_effort=self.best_effort + (not is_guaranteed),
            prefill_tokens=self.prefill_tokens + need.prompt_tokens,
            kv_free=self.kv_free - need.kv_tokens,
        )


@dataclass(frozen=True)
class Need:
    """Prefill tokens, K/V slots and SLOs that one request needs on a replica."""

    prompt_tokens: int
    kv_tokens: int  # K/V slots at its maximum length, with the largest draft tree
    tpot_slo_s: float = math.inf
    ttft_slo_s: float = math.inf

    @property
    def has_slo(self) -> bool:
        """Return whether the request has a TPOT or TTFT SLO."""
        return min(self.tpot_slo_s, self.ttft_slo_s) < math.inf


def ranked(loads: Sequence[ReplicaLoad], need: Need, num_reusable: Sequence[int] = ()) -> list[int]:
    """Return the indices of the replicas in the order in which a request is offered to them.

    Replicas with free slots for its K/V come first, ordered by how little the request raises the
    sum of ``(expected time / SLO) ** POWER`` over all their requests, itself included. This
    balances prefill as well as decoding, and separates tight from loose SLOs where batches with
    loose ones are too large to meet tight ones.

    A request without SLOs goes to the least loaded replica; cached K/V of its whole prompt counts
    as ``AFFINITY`` fewer requests.

    Args:
        loads: one per replica, at least one.
        num_reusable: number of the prompt's tokens whose K/V each replica has cached; none if
            omitted.
    """
    num_cached = num_reusable or [0] * len(loads)
    if not need.has_slo:
        shares = [cached / max(need.prompt_tokens, 1) for cached in num_cached]
        return sorted(
            range(len(loads)),
            key=lambda index: (
                loads[index].num_requests - AFFINITY * shares[index],
                loads[index].prefill_tokens,
                -loads[index].kv_free,
                index,
            ),
        )
    weight = _weight(need.tpot_slo_s)
    ttft_slo_s = max(need.ttft_slo_s, LEAST_S)

    def cost(index: int) -> tuple[float, ...]:
        load = loads[index]
        left = max(need.prompt_tokens - num_cached[index], 0)
        prefill_s = load.prefill_s(left)
        tpot_s = load.next_decoding_s + prefill_s / load.output_tokens
        strain = (load.weight + weight) * tpot_s**POWER + (prefill_s / ttft_slo_s) ** POWER
        return (
            load.kv_free < need.kv_tokens,
            strain - load.strain,
            load.prefill_tokens + left,
            index,
        )

    return sorted(range(len(loads)), key=cost)


def utilisation(load: ReplicaLoad) -> float:
    """Return the expected TPOT as a share of the tightest guaranteed TPOT SLO; above 1, that SLO is
    missed.
    """
    tightest_s = min((tpot_slo_s for tpot_slo_s, _ in load.guaranteed), default=math.inf)
    return load.tpot_s / max(tightest_s, LEAST_S)


def _weight(tpot_slo_s: float) -> float:
    return float(max(tpot_slo_s, LEAST_S) ** -POWER)  # 0 without an SLO
