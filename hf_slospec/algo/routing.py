"""Routing of a request over replicas, by what each can guarantee (after SLOs-Serve, section 4).

A router ranks the replicas; each replica decides by its own admission control, and a request that it refuses goes on to
the next one. The ranking is a pure function, which the servers' router and the simulator share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hf_slospec.algo.latency import LatencyCurve

POWER = 4.0  # exponent of the ratio of time to SLO: the larger, the less requests far from missing theirs count
AFFINITY = 2.0  # requests that K/V of a whole prompt outweighs
LEAST_S = 1e-6  # shorter SLOs count as this one
FREE = LatencyCurve((1,), (0.0,))


@dataclass(frozen=True)
class ReplicaLoad:
    """State of a replica as it reports it."""

    guaranteed: tuple[tuple[float, int], ...] = ()  # TPOT SLO in seconds (inf: none), unfinished requests with it
    best_effort: int = 0  # unfinished requests without a guarantee
    prefill_tokens: int = 0  # prompt tokens of all these requests that are not processed yet
    kv_free: int = 0  # tokens of K/V that no unfinished request holds or waits for
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
        """Seconds per output token that its requests can expect.

        This is a step's time by the tokens it commits for a request, and the time of the prefill, which every request
        waits for, by the tokens of an output.
        """
        return self._decoding_s(self.num_requests) + self.prefill_s() / self.output_tokens

    @cached_property
    def next_decoding_s(self) -> float:
        """Seconds per output token without prefill, if it had a further request."""
        return self._decoding_s(self.num_requests + 1)

    def prefill_s(self, more_tokens: int = 0) -> float:
        """Return the seconds in which the prompts are processed, and ``more_tokens`` with them."""
        num_tokens = self.prefill_tokens + more_tokens
        return self.step_s.at(num_tokens) if num_tokens > 0 else 0.0

    def _decoding_s(self, num_requests: int) -> float:
        step_s = self.draft_s + self.step_s.at(num_requests * self.nodes) if num_requests else 0.0
        return step_s / self.acceptance_length

    def with_request(self, need: Need, is_guaranteed: bool) -> ReplicaLoad:
        """Return the load with a further request, which was sent since the replica reported."""
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
    """A request, as far as routing depends on it."""

    prompt_tokens: int
    kv_tokens: int  # that it holds at its longest
    tpot_slo_s: float = math.inf
    ttft_slo_s: float = math.inf

    @property
    def has_slo(self) -> bool:
        """Return whether there is anything to guarantee."""
        return min(self.tpot_slo_s, self.ttft_slo_s) < math.inf


def ranked(loads: Sequence[ReplicaLoad], need: Need, num_reusable: Sequence[int] = ()) -> list[int]:
    """Return the replicas in the order in which a request is offered to them.

    Replicas with room for its K/V come first, and of them those where the request brings all requests together, itself
    included, least closer to missing their SLOs: the least rise of the sum of ``(expected time / SLO) ** POWER``.
    Loads are balanced by that, prompts as well as decoding, and requests with tight and with loose SLOs are kept apart
    where batches of loose ones are large enough to be too slow for tight ones.

    A request without SLOs goes to the least loaded replica; K/V of its whole prompt weighs as much as ``AFFINITY``
    requests there.

    Args:
        loads: one per replica, at least one.
        num_reusable: prompt tokens whose K/V each replica has; none if omitted.
    """
    known = num_reusable or [0] * len(loads)
    if not need.has_slo:
        shares = [own / max(need.prompt_tokens, 1) for own in known]
        return sorted(range(len(loads)), key=lambda index: _emptiness(loads[index], index, shares[index]))
    own_weight, ttft_slo_s = _weight(need.tpot_slo_s), max(need.ttft_slo_s, LEAST_S)

    def cost(index: int) -> tuple[float, ...]:
        load, left = loads[index], max(need.prompt_tokens - known[index], 0)
        prefill_s = load.prefill_s(left)
        tpot_s = load.next_decoding_s + prefill_s / load.output_tokens
        strain = (load.weight + own_weight) * tpot_s**POWER + (prefill_s / ttft_slo_s) ** POWER
        return load.kv_free < need.kv_tokens, strain - load.strain, load.prefill_tokens + left, index

    return sorted(range(len(loads)), key=cost)


def utilisation(load: ReplicaLoad) -> float:
    """Return the expected TPOT as a share of the tightest guaranteed SLO; above 1 it is not kept."""
    tightest_s = min((tpot_slo_s for tpot_slo_s, _ in load.guaranteed), default=math.inf)
    return load.tpot_s / max(tightest_s, LEAST_S)


def _weight(tpot_slo_s: float) -> float:
    return float(max(tpot_slo_s, LEAST_S) ** -POWER)  # 0 without an SLO


def _emptiness(load: ReplicaLoad, index: int, known_share: float = 0.0) -> tuple[float, ...]:
    return load.num_requests - AFFINITY * known_share, load.prefill_tokens, -load.kv_free, index
