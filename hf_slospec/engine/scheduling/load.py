"""Report of an engine's load, for routers."""

from __future__ import annotations

from collections import Counter

from hf_slospec.algo.replica_ranking import Need, ReplicaLoad
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.continuous import ContinuousScheduler, Limits
from hf_slospec.engine.scheduling.guarantees import MAX_STEP, first_token_slo_s, tightest_tpot_slo_s


def load_of(scheduler: ContinuousScheduler) -> ReplicaLoad:
    """Return the load of an engine's scheduler between two steps, in time that does not grow with the queue."""
    running, waiting, limits = scheduler.running, scheduler.waiting, scheduler.limits
    guaranteed = waiting.guaranteed + Counter(tightest_tpot_slo_s(r) for r in running if r.is_guaranteed)
    waiting_slots = waiting.max_len + len(waiting) * limits.max_nodes
    return ReplicaLoad(
        guaranteed=tuple(sorted(guaranteed.items())),
        best_effort=len(running) + len(waiting) - guaranteed.total(),
        prefill_tokens=waiting.num_tokens + sum(r.num_uncached for r in running if not r.is_decoding),
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
    return Need(request.prompt_len, kv_tokens, tightest_tpot_slo_s(request), first_token_slo_s(request))
