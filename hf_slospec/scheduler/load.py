"""Report of an engine's load, for routers."""

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
    """Return the load of an engine's scheduler between two steps, in time that does not grow with
    the queue.
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
        acceptance_length=scheduler.costs.recent.tokens,
        nodes=scheduler.costs.recent.nodes,
        draft_s=scheduler.costs.recent.draft_s,
        output_tokens=scheduler.output_tokens,
    )


def need_of(request: Request, limits: Limits) -> Need:
    """Return what a request needs from a replica."""
    kv_tokens = limits.kv_needed(request.params)
    return Need(
        request.prompt_len, kv_tokens, tightest_tpot_slo_s(request), first_token_slo_s(request)
    )


# Exponent of the ratio of time to SLO; a larger one weighs requests far from missing their SLOs
# less
POWER = 4.0
AFFINITY = 2.0  # cached K/V of a whole prompt weighs as much as so many fewer requests
LEAST_S = 1e-6  # shorter SLOs count as this one
FREE = LatencyCurve((1,), (0.0,))


@dataclass(frozen=True)
class ReplicaLoad:
    """Load that a replica reports."""

    guaranteed: tuple[
        tuple[float, int], ...
    ] = ()  # TPOT SLO in seconds (inf: none), unfinished requests with it
    best_effort: int = 0  # unfinished requests without a guarantee
    prefill_tokens: int = (
        0  # prompt tokens of all unfinished requests that are still to be prefilled
    )
    kv_free: int = 0  # slots of K/V that no unfinished request holds or waits for
    step_s: LatencyCurve = FREE  # seconds of a step by its tokens, drafting excluded
    acceptance_length: float = 1.0  # tokens committed per request and step, recently
    nodes: float = 1.0  # verified per request and step, roots included, recently
    draft_s: float = 0.0  # seconds of drafting in a step, recently
    output_tokens: float = 100.0  # per request, averaged over those that finished recently

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return sum([count for _, count in self.guaranteed], self.best_effort)

    @cached_property
    def weight(self) -> float:
        """Sum over the guaranteed requests of ``1 / SLO ** POWER``."""
        return sum([count * _weight(tpot_slo_s) for tpot_slo_s, count in self.guaranteed])

    @cached_property
    def strain(self) -> float:
        """Sum over the guaranteed requests of ``(TPOT / SLO) ** POWER``."""
        return float(self.weight * self.tpot_s**POWER)

    @property
    def tpot_s(self) -> float:
        """Expected seconds per output token.

        This is the time of a step divided by the tokens it commits for a request, plus the time of
        all pending prefill, which every request waits for, divided by the tokens of an output.
        """
        return self._decoding_s(self.num_requests) + self.prefill_s() / self.output_tokens

    @cached_property
    def next_decoding_s(self) -> float:
        """Seconds per output token with one more request, prefill not counted."""
        return self._decoding_s(self.num_requests + 1)

    def prefill_s(self, more_tokens: int = 0) -> float:
        """Return the seconds of all pending prefill and of ``more_tokens``."""
        num_tokens = self.prefill_tokens + more_tokens
        return self.step_s(num_tokens) if num_tokens > 0 else 0.0

    def _decoding_s(self, num_requests: int) -> float:
        step_s = self.draft_s + self.step_s(num_requests * self.nodes) if num_requests else 0.0
        return step_s / self.acceptance_length

    def with_request(self, need: Need, is_guaranteed: bool) -> ReplicaLoad:
        """Return the load with one more request, which was sent after the replica's report."""
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
    """Needs of a request: prefill, slots of K/V, and SLOs."""

    prompt_tokens: int
    kv_tokens: int  # slots of K/V at its maximum length
    tpot_slo_s: float = math.inf
    ttft_slo_s: float = math.inf

    @property
    def has_slo(self) -> bool:
        """Return whether the request has a TPOT or TTFT SLO."""
        return min(self.tpot_slo_s, self.ttft_slo_s) < math.inf


def ranked(loads: Sequence[ReplicaLoad], need: Need, num_reusable: Sequence[int] = ()) -> list[int]:
    """Return the replicas in the order in which a request is offered to them.

    Replicas with free slots for its K/V come first, ordered by how little the request raises the
    sum of ``(expected time / SLO) ** POWER`` over all their requests, itself included. This
    balances prefill as well as decoding, and separates tight from loose SLOs where batches with
    loose ones are too large to meet tight ones.

    A request without SLOs goes to the least loaded replica; cached K/V of its whole prompt counts
    as ``AFFINITY`` fewer requests.

    Args:
        loads: one per replica, at least one.
        num_reusable: prompt tokens whose K/V each replica has; none if omitted.
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
    """Return the expected TPOT as a share of the tightest guaranteed SLO; above 1, that SLO is
    missed.
    """
    tightest_s = min((tpot_slo_s for tpot_slo_s, _ in load.guaranteed), default=math.inf)
    return load.tpot_s / max(tightest_s, LEAST_S)


def _weight(tpot_slo_s: float) -> float:
    return float(max(tpot_slo_s, LEAST_S) ** -POWER)  # 0 without an SLO
