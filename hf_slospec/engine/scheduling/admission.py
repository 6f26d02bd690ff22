"""Who is promised its targets: SLOs-Serve's dynamic programme on what is known of requests and steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from hf_slospec.algo.admission import Candidate, admitted, prefill_rate
from hf_slospec.algo.latency import ForwardCost
from hf_slospec.algo.tree import FloatArray, IntArray
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.pace import Pace

MAX_TIERS = 3  # classes of targets that are told apart; the number of states grows with the power of it
MAX_CANDIDATES = 16  # that are looked at together, those with the earliest deadlines
MAX_PRIORITIES = 3  # that are told apart, the highest ones
MAX_CHAIN = 8
MAX_STEP = 1024  # tokens
MARGIN = 0.85  # of targets is planned with: what steps commit varies


def tightest_tpot_slo_s(request: Request) -> float:
    """Of all its stages; inf without any."""
    return min((stage.tpot_slo_s for stage in request.stages if stage.tpot_slo_s is not None), default=math.inf)


def prefill_deadline_s(request: Request) -> float:
    """On the engine's clock; inf without a target for the first token."""
    return math.inf if request.ttft_slo_s is None else request.arrived_s + request.ttft_slo_s


def promised(
    undecided: Sequence[Request],
    promised_before: Sequence[Request],
    kv_free: int,
    kv_needed: Callable[[Request], int],
    pace: Pace,
    now_s: float,
) -> list[Request]:
    """The undecided requests whose targets can be met beside those promised before.

    Args:
        promised_before: those not finished, still in prefill or decoding.
        kv_free: slots that no promised request holds.
    """
    level_s = pace.draft_s / max(pace.depth, 1.0)
    # Rounded, so that rates are found again as long as little changes.
    known = pace.costs.verify, _rounded(pace.factor), _rounded(level_s), round(pace.acceptance, 1)
    possible = [r for r in undecided if _rate(*known, (_rounded(MARGIN * tightest_tpot_slo_s(r)),), (1,)) >= 0.0]
    looked_at = sorted(possible, key=prefill_deadline_s)[:MAX_CANDIDATES]
    tiers = tiers_of([tightest_tpot_slo_s(request) for request in (*looked_at, *promised_before)])

    def tier_of(request: Request) -> int:
        """The highest target that is not above its own, so that its own is met."""
        return max(int(np.searchsorted(tiers, tightest_tpot_slo_s(request), side="right")) - 1, 0)

    def candidate(request: Request, is_forced: bool) -> Candidate:
        deadline_s = MARGIN * (prefill_deadline_s(request) - now_s)
        tokens, slots = request.num_uncached, kv_needed(request)
        return Candidate(deadline_s, tokens, slots, tier_of(request), rank[request.priority], is_forced)

    priorities = sorted({request.priority for request in (*looked_at, *promised_before)}, reverse=True)
    rank = {priority: -min(place, MAX_PRIORITIES - 1) for place, priority in enumerate(priorities)}

    running = [0] * len(tiers)
    for request in promised_before:
        running[tier_of(request)] += request.is_decoding
    forced = [request for request in promised_before if not request.is_decoding]
    requests = [*looked_at, *forced]
    candidates = [candidate(request, index >= len(looked_at)) for index, request in enumerate(requests)]
    planned_s = tuple(_rounded(MARGIN * tpot_slo_s) for tpot_slo_s in tiers)

    def rate(counts: tuple[int, ...]) -> float:
        return _rate(*known, planned_s, counts)

    chosen = admitted(candidates, rate, tuple(running), kv_free)
    return [requests[index] for index in chosen if index < len(looked_at)]


@functools.lru_cache(maxsize=4096)
def _rate(
    verify: ForwardCost,
    factor: float,
    level_s: float,
    acceptance: float,
    tpot_slos_s: tuple[float, ...],
    counts: tuple[int, ...],
) -> float:
    def step_s(num_tokens: IntArray) -> FloatArray:
        return verify(num_tokens) * factor

    return prefill_rate(step_s, tpot_slos_s, counts, acceptance, MAX_CHAIN, MAX_STEP, level_s)


def _rounded(value: float) -> float:
    """To the next of values that lie 5 % apart."""
    return math.exp(round(math.log(value) * 20.0) / 20.0) if 0.0 < value < math.inf else value


def tiers_of(tpot_slos_s: Sequence[float]) -> list[float]:
    """At most :data:`MAX_TIERS` targets, ascending, that stand for all of these: each for those up to the next."""
    distinct = sorted(set(tpot_slos_s))
    if len(distinct) <= MAX_TIERS:
        return distinct
    finite = [target for target in distinct if math.isfinite(target)]
    edges = np.geomspace(finite[0], finite[-1], MAX_TIERS + (len(finite) == len(distinct)))[:-1]
    standing = {min(target for target in finite if target >= edge * (1 - 1e-9)) for edge in edges}
    return sorted({*standing, *(target for target in distinct if math.isinf(target))})
