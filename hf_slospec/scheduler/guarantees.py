"""Admission: requests whose SLOs can be guaranteed, by SLOs-Serve's dynamic programme on the cost
model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from hf_slospec.engine.costs import StepCosts, rounded
from hf_slospec.engine.latency_curves import LatencyCurve
from hf_slospec.request.request import Request
from hf_slospec.request.slo import LEAST_SLO_S
from hf_slospec.scheduler.admission import Candidate, Counts, admitted, prefill_rate
from hf_slospec.scheduler.window_guarantees import MARGIN, WindowGuarantees

MAX_TIERS = 3  # classes of TPOT SLOs; the number of states grows exponentially with it
MAX_CANDIDATES = 16  # requests of one decision: those with the earliest deadlines
MAX_PRIORITIES = 3  # priorities that one decision tells apart; all higher numbers count as the last
CONTINUED = 4  # factor on the value of a request that continues a guaranteed one after a pause
MAX_CHAIN = 8  # nodes of a chain, root included
MAX_STEP = 1024  # tokens
PLAIN_USE = (
    0.7  # share of the most tokens per second that steps shortened for plain decoding must reach
)
FIRST_SHARE = 0.25  # share of an E2E SLO without a TTFT SLO that is planned for queue and prefill


def tightest_tpot_slo_s(request: Request) -> float:
    """Return the tightest SLO that decode steps have to keep: of any stage, or what an E2E SLO
    leaves each token.

    Returns:
        Seconds per token; inf without any.
    """
    params = request.params
    slos_s = params.stage_slos_s
    if params.e2e_slo_s is not None and params.max_new_tokens > 1:
        left_s = params.e2e_slo_s - first_token_slo_s(request)
        slos_s.append(max(left_s / (params.max_new_tokens - 1), LEAST_SLO_S))
    return min(slos_s, default=math.inf)


def first_token_slo_s(request: Request) -> float:
    """Return the TTFT SLO or, for an E2E SLO alone, the share of it that is planned for the first
    token; else inf.

    The rest of an E2E SLO is planned for the other tokens, as many as the request may have.
    """
    params = request.params
    if params.ttft_slo_s is not None:
        return params.ttft_slo_s
    return (
        math.inf
        if params.e2e_slo_s is None
        else max(FIRST_SHARE, 1 / params.max_new_tokens) * params.e2e_slo_s
    )


def prefill_deadline_s(request: Request) -> float:
    """Return the engine's time at which the first token is due; inf if no SLO says so and for a
    resumed request.
    """
    return (
        math.inf
        if request.stats.num_resumed
        else request.stats.arrived_s + first_token_slo_s(request)
    )


def lost_s(request: Request) -> float:
    """Return the engine's time after which a request without a token has missed an SLO; inf as for
    the deadline.
    """
    slo_s = (
        request.params.e2e_slo_s if request.params.ttft_slo_s is None else request.params.ttft_slo_s
    )
    return (
        math.inf if slo_s is None or request.stats.num_resumed else request.stats.arrived_s + slo_s
    )


def planned_tpot_slo_s(request: Request) -> float:
    """Return the seconds per token of a request to plan with by default, rounded so that few values
    differ.
    """
    return rounded(MARGIN * tightest_tpot_slo_s(request))


def possible_slos(costs: StepCosts, windows: WindowGuarantees) -> Callable[[float], bool]:
    """Return a function of :func:`planned_tpot_slo_s` that returns whether a request alone can be
    decoded in time.
    """
    return lambda planned_s: _rate_of([planned_s / MARGIN], costs, windows)((1,)) >= 0.0


def _rate_of(
    tiers: Sequence[float], costs: StepCosts, windows: WindowGuarantees
) -> Callable[[Counts], float]:
    """Return a function of the decoding requests of each tier that returns the prefill rate beside
    them.

    It is negative if they miss their SLOs. Where steps can fall back to plain ones, it is enough
    that these are fast enough, however few drafts are accepted.
    """
    curve = costs.step_curve(MAX_STEP)
    # rounded so that cached rates can be used
    level_s = rounded(costs.recent.draft_s / max(costs.recent.depth, 1.0))
    acceptance = round(costs.recent.acceptance, 1)
    planned_s = _planned(tiers, windows.share)
    plain_s = _planned(tiers, windows.plain_share)
    is_plain = [can_fall_back(tpot_slo_s, costs, windows) for tpot_slo_s in tiers]

    def rate(counts: Counts) -> float:
        speculating = prefill_rate(
            curve, planned_s, counts, acceptance, MAX_CHAIN, MAX_STEP, level_s
        )
        if not all(is_plain[tier] for tier, count in enumerate(counts) if count):
            return speculating
        return max(speculating, prefill_rate(curve, plain_s, counts, 0.0, 1, MAX_STEP))

    return rate


def can_fall_back(tpot_slo_s: float, costs: StepCosts, windows: WindowGuarantees) -> bool:
    """Return whether steps can be so short that one token each keeps the SLO, and still use most of
    the machine.
    """
    if not windows.falls_back:
        return False
    limit_s = rounded(windows.plain_share(tpot_slo_s) * tpot_slo_s)
    return limit_s == math.inf or _used(costs.step_curve(MAX_STEP), limit_s) >= PLAIN_USE


@functools.lru_cache(maxsize=4096)
def _used(curve: LatencyCurve, limit_s: float) -> float:
    """Return the tokens per second of the largest step within the limit, as a share of those of the
    largest of all.
    """
    sizes = np.arange(1, MAX_STEP + 1)
    seconds = curve(sizes)
    rates = sizes[seconds <= limit_s] / seconds[seconds <= limit_s]
    return float(rates[-1] * seconds[-1] / MAX_STEP) if len(rates) else 0.0


def _planned(tiers: Sequence[float], share: Callable[[float], float]) -> tuple[float, ...]:
    return tuple(rounded(share(tpot_slo_s) * tpot_slo_s) for tpot_slo_s in tiers)


def guarantee_windows(
    requests: Sequence[Request], costs: StepCosts, windows: WindowGuarantees
) -> None:
    """Guarantee TPOT SLOs of a batch over windows of ten tokens, if all can be decoded fast enough
    together.
    """
    if all(stage.tpot_slo_s is None for request in requests for stage in request.params.stages):
        return  # planning takes a millisecond
    windows.output_tokens = sum(request.params.max_new_tokens for request in requests) / len(
        requests
    )
    tiers = tiers_of([tightest_tpot_slo_s(request) for request in requests])
    counts = np.bincount([_tier_of(tiers, request) for request in requests], minlength=len(tiers))
    if _rate_of(tiers, costs, windows)(tuple(counts.tolist())) >= 0.0:
        for request in requests:
            windows.give(request, tightest_tpot_slo_s(request), 0.0)


def guaranteeable(
    undecided: Sequence[Request],
    guaranteed: Sequence[Request],
    kv_free: int,
    kv_needed: Callable[[Request], int],
    num_reusable: Callable[[Request], int],
    costs: StepCosts,
    windows: WindowGuarantees,
    now_s: float,
) -> list[Request]:
    """Return the undecided requests whose SLOs can be met in addition to those guaranteed before.

    Args:
        guaranteed: unfinished guaranteed requests, in prefill or decoding.
        kv_free: slots that no guaranteed request holds.
        kv_needed: returns the slots of a request.
        num_reusable: returns the tokens of a request that need no prefill, since their K/V can be
            reused.
        windows: returns the share of each SLO to plan with.
    """
    is_possible = possible_slos(costs, windows)
    possible = [request for request in undecided if is_possible(planned_tpot_slo_s(request))]
    candidates = sorted(possible, key=prefill_deadline_s)[:MAX_CANDIDATES]
    tiers = tiers_of([tightest_tpot_slo_s(request) for request in (*candidates, *guaranteed)])
    priorities = sorted({request.params.priority for request in (*candidates, *guaranteed)})
    rank = {priority: min(number, MAX_PRIORITIES - 1) for number, priority in enumerate(priorities)}

    step_s = costs.recent.step_s if any(request.is_decoding for request in guaranteed) else 0.0

    def candidate(request: Request, is_forced: bool) -> Candidate:
        deadline_s = windows.first_share() * (prefill_deadline_s(request) - now_s)
        tokens = request.num_uncached - num_reusable(request)
        slots = kv_needed(request)
        # The first token comes with the end of a step; the next one can be as short as that of the
        # prompt alone.
        if (
            step_s > 0.0
            and math.isfinite(deadline_s)
            and not costs.verify_s(tokens) <= deadline_s < step_s
        ):
            deadline_s = deadline_s // step_s * step_s
        params = request.params
        earlier = request.params.earlier
        value = params.value * (CONTINUED if earlier is not None and earlier.guaranteed else 1)
        return Candidate(
            deadline_s,
            tokens,
            slots,
            _tier_of(tiers, request),
            rank[params.priority],
            value,
            is_forced,
        )

    running = [0] * len(tiers)
    for request in guaranteed:
        running[_tier_of(tiers, request)] += request.is_decoding
    forced = [request for request in guaranteed if not request.is_decoding]
    jobs = [
        *(candidate(request, False) for request in candidates),
        *(candidate(request, True) for request in forced),
    ]
    chosen = admitted(jobs, _rate_of(tiers, costs, windows), tuple(running), kv_free)
    return [candidates[index] for index in chosen if index < len(candidates)]


def _tier_of(tiers: Sequence[float], request: Request) -> int:
    """Return the loosest tier that is not looser than the request's SLO."""
    return max(int(np.searchsorted(tiers, tightest_tpot_slo_s(request), side="right")) - 1, 0)


def tiers_of(tpot_slos_s: Sequence[float]) -> list[float]:
    """Return at most :data:`MAX_TIERS` of the SLOs, ascending; each represents the SLOs from it up
    to the next.
    """
    distinct = sorted(set(tpot_slos_s))
    if len(distinct) <= MAX_TIERS:
        return distinct
    finite = [slo_s for slo_s in distinct if math.isfinite(slo_s)]
    edges = np.geomspace(finite[0], finite[-1], MAX_TIERS + (len(finite) == len(distinct)))[:-1]
    tiers = {min(slo_s for slo_s in finite if slo_s >= edge * (1 - 1e-9)) for edge in edges}
    return sorted({*tiers, *(slo_s for slo_s in distinct if math.isinf(slo_s))})
