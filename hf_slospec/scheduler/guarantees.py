"""Choice of the requests whose SLOs can be guaranteed, by the dynamic programme of ``admission.py``
and the cost model.
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

MAX_TIERS = 3  # maximum tiers into which TPOT SLOs are grouped; states grow exponentially with it
MAX_CANDIDATES = 16  # maximum requests per decision: those with the earliest deadlines
MAX_PRIORITIES = 3  # priorities that one decision tells apart; all higher numbers count as the last
CONTINUED = 4  # factor on the value of a request that continues a guaranteed one after a pause
MAX_CHAIN = 8  # longest draft chain that is planned with, in nodes, root included
MAX_STEP = 1024  # largest step that is planned with, in tokens
# An SLO allows plain decoding only if steps that keep it reach this share of the maximum tokens per
# second
PLAIN_USE = 0.7
# Without a TTFT SLO, this share of an E2E SLO is planned for queueing and prefill
FIRST_SHARE = 0.25


def tightest_tpot_slo_s(request: Request) -> float:
    """Return the tightest SLO per token that decode steps have to keep: the least of all stages'
    TPOT SLOs and the time per token that the E2E SLO leaves for decoding.

    Returns:
        Seconds per token; inf if the request has neither.
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

    The rest of an E2E SLO is planned for the other tokens, as many as ``max_new_tokens`` allows.
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
    """Return the time on the engine's clock at which the first token is due; inf for a request
    without TTFT and E2E SLO, and for a resumed one.
    """
    return (
        math.inf
        if request.stats.num_resumed
        else request.stats.arrived_s + first_token_slo_s(request)
    )


def lost_s(request: Request) -> float:
    """Return the time on the engine's clock after which a request without a token has missed its
    TTFT or E2E SLO; inf for a request without either, and for a resumed one.
    """
    slo_s = (
        request.params.e2e_slo_s if request.params.ttft_slo_s is None else request.params.ttft_slo_s
    )
    return (
        math.inf if slo_s is None or request.stats.num_resumed else request.stats.arrived_s + slo_s
    )


def planned_tpot_slo_s(request: Request) -> float:
    """Return the seconds per token that a request is planned with if no probability is stated,
    rounded so that requests have few different values.
    """
    return rounded(MARGIN * tightest_tpot_slo_s(request))


def possible_slos(costs: StepCosts, windows: WindowGuarantees) -> Callable[[float], bool]:
    """Return a function that takes a value of :func:`planned_tpot_slo_s`, and returns whether a
    request that decodes alone can keep it.
    """
    return lambda planned_s: _rate_of([planned_s / MARGIN], costs, windows)((1,)) >= 0.0


def _rate_of(
    tiers: Sequence[float], costs: StepCosts, windows: WindowGuarantees
) -> Callable[[Counts], float]:
    """Return a function that takes the number of decoding requests in each tier, and returns the
    prompt tokens per second that can be prefilled beside them.

    The rate is negative if these requests miss their SLOs. Where the policy can fall back to plain
    decoding, it is enough that steps without drafts are fast enough, however few drafts are
    accepted.
    """
    curve = costs.step_curve(MAX_STEP)
    request_s = costs.request_s
    # rounded, so that the cache of `prefill_rate` is hit
    level_s = rounded(costs.recent.draft_s / max(costs.recent.depth, 1.0))
    acceptance = round(costs.recent.acceptance, 1)
    planned_s = _planned(tiers, windows.share)
    plain_s = _planned(tiers, windows.plain_share)
    is_plain = [can_fall_back(tpot_slo_s, costs, windows) for tpot_slo_s in tiers]

    def rate(counts: Counts) -> float:
        speculating = prefill_rate(
            curve, planned_s, counts, acceptance, MAX_CHAIN, MAX_STEP, level_s, request_s
        )
        if not all(is_plain[tier] for tier, count in enumerate(counts) if count):
            return speculating
        return max(
            speculating, prefill_rate(curve, plain_s, counts, 0.0, 1, MAX_STEP, 0.0, request_s)
        )

    return rate


def can_fall_back(tpot_slo_s: float, costs: StepCosts, windows: WindowGuarantees) -> bool:
    """Return whether plain decoding keeps the SLO: whether steps so short that one token each is
    enough still reach :data:`PLAIN_USE` of the maximum tokens per second.
    """
    if not windows.falls_back:
        return False
    limit_s = rounded(windows.plain_share(tpot_slo_s) * tpot_slo_s)
    return limit_s == math.inf or _used(costs.step_curve(MAX_STEP), limit_s) >= PLAIN_USE


@functools.lru_cache(maxsize=4096)
def _used(curve: LatencyCurve, limit_s: float) -> float:
    """Return the tokens per second of the largest step within the limit, as a share of the tokens
    per second of a step of :data:`MAX_STEP` tokens.
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
    """Guarantee the TPOT SLOs of a batch over windows of ten tokens, if all of its requests
    together can be decoded fast enough.
    """
    if all(stage.tpot_slo_s is None for request in requests for stage in request.params.stages):
        return  # saves the planning below, which takes a millisecond
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
    """Return the undecided requests whose SLOs can be met without breaking guarantees given before.

    Args:
        guaranteed: unfinished guaranteed requests, in prefill or decoding.
        kv_free: K/V slots that no guaranteed request holds.
        kv_needed: returns the K/V slots that a request needs.
        num_reusable: returns the tokens of a request that need no prefill, since their K/V can be
            reused.
        windows: provides the share of each SLO to plan with.
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
        # A first token comes at the end of a step, so the deadline is rounded down to whole steps,
        # unless one step of only the prompt, shorter than those before, is in time.
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
    """Return the index of the loosest tier that is not looser than the tightest TPOT SLO."""
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
