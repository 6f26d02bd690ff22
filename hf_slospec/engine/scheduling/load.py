"""Report of an engine's load to those who route requests to it."""

from __future__ import annotations

from collections import Counter

from hf_slospec.algo.routing import Need, ReplicaLoad
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.admission import MAX_STEP, tightest_tpot_slo_s
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler, Limits


def load_of(scheduler: ContinuousScheduler) -> ReplicaLoad:
    """Return the load of an engine's scheduler."""
    unfinished = (*scheduler.running, *scheduler.waiting)
    guaranteed = Counter(tightest_tpot_slo_s(request) for request in unfinished if request.is_guaranteed)
    return ReplicaLoad(
        guaranteed=tuple(sorted(guaranteed.items())),
        best_effort=len(unfinished) - guaranteed.total(),
        prefill_tokens=sum(request.num_uncached for request in unfinished if not request.is_decoding),
        kv_free=scheduler.limits.kv_tokens - sum(map(scheduler.limits.kv_needed, unfinished)),
        step_s=scheduler.costs.step_curve(MAX_STEP),
        acceptance_length=scheduler.costs.recent.tokens,
        nodes=scheduler.costs.recent.nodes,
        draft_s=scheduler.costs.recent.draft_s,
        output_tokens=scheduler.output_tokens,
    )


def need_of(request: Request, limits: Limits) -> Need:
    """Return what a request needs."""
    ttft_slo_s = float("inf") if request.ttft_slo_s is None else request.ttft_slo_s
    return Need(request.prompt_len, limits.kv_needed(request), tightest_tpot_slo_s(request), ttft_slo_s)
