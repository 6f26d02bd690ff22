"""Routing of a request over replicas, by what each can guarantee (after SLOs-Serve, section 4).

A router ranks the replicas; each replica decides by its own admission control, and a request that it refuses goes on to
the next one. The ranking is a pure function, which the servers' router and the simulator share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_slospec.algo.latency import LatencyCurve

FREE = LatencyCurve((1,), (0.0,))  # of a replica that has not reported


@dataclass(frozen=True)
class ReplicaLoad:
    """State of a replica as it reports it."""

    guaranteed: tuple[tuple[float, int], ...] = ()  # TPOT SLO in seconds (inf: none), unfinished requests with it
    best_effort: int = 0  # unfinished requests without a guarantee
    prefill_tokens: int = 0  # of all these, prompt tokens that are not processed yet
    kv_free: int = 0  # tokens of K/V that no unfinished request holds or waits for
    step_s: LatencyCurve = FREE  # seconds of a step by its tokens
    acceptance_length: float = 1.0  # tokens committed per request and step, recently

    @property
    def num_requests(self) -> int:
        """Unfinished requests."""
        return self.best_effort + sum(count for _, count in self.guaranteed)

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

    Args:
        loads: one per replica, at least one.
        num_reusable: prompt tokens whose K/V each replica has; none if omitted.
    """
    known = num_reusable or [0] * len(loads)

    def cost(index: int) -> tuple[float, ...]:
        load, left = loads[index], need.prompt_tokens - known[index]
        return (
            float(load.kv_free < need.kv_tokens),
            utilisation(load.with_request(need, True)) - utilisation(load),
            load.prefill_tokens + left,
            index,
        )

    return sorted(range(len(loads)), key=cost if need.has_slo else lambda index: _emptiness(loads[index], index))


def least_loaded(loads: Sequence[ReplicaLoad]) -> int:
    """Return the replica with the fewest unfinished requests, then the least prefill."""
    return min(range(len(loads)), key=lambda index: _emptiness(loads[index], index))


def _emptiness(load: ReplicaLoad, index: int) -> tuple[float, ...]:
    return load.num_requests, load.prefill_tokens, -load.kv_free, index


def utilisation(load: ReplicaLoad) -> float:
    """Return the share of its time in which a replica keeps its TPOT SLOs; above 1 it cannot keep all."""
    count = sum(count for _, count in load.guaranteed)
    tightest_s = min((tpot_slo_s for tpot_slo_s, _ in load.guaranteed), default=math.inf)
    return float(load.step_s(count)) / (tightest_s * load.acceptance_length) if count else 0.0
