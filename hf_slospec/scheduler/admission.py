"""Admission control of the SLOs-Serve paper (arXiv 2504.08784): prefill capacity and the dynamic
programme over requests. ``guarantees.py`` calls it.

An admitted request has a guarantee: its prompt is processed by a deadline, and it then decodes at
the TPOT SLO of its tier, a group of requests with similar TPOT SLOs. Corrections to the printed
programme are marked [FIX].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.tree.select import StepTime
from hf_slospec.tree.tree import FloatArray, IntArray


@dataclass(frozen=True)
class SpecLengths:
    """Chain lengths with which every tier meets its TPOT SLO on average."""

    # [tiers] tokens verified per request and step; 1: plain decoding, 0: the tier is empty
    lengths: IntArray
    limit_s: float  # maximum seconds of the step; inf without any TPOT SLO
    rate: float  # prompt tokens per second that can be prefilled


def best_lengths(
    step_s: StepTime,
    tpot_slos_s: Sequence[float],
    counts: Sequence[int],
    acceptance: float,
    max_len: int,
    max_tokens: int,
    draft_level_s: float = 0.0,
    slacks_s: Sequence[float] | None = None,
    request_s: float = 0.0,
) -> SpecLengths | None:
    """Return the chain lengths, one per tier, that allow the highest prefill rate (SLOs-Serve,
    appendix D).

    A step holds chains of one length per tier, and fills up with prompt tokens. A chain of s tokens
    (1: plain decoding) commits Acc(s) = 1 + a + ... + a^(s-1) in expectation, so a step may last up
    to tpot_slo * Acc(s). The tier with the smallest such bound limits the step. Given that limit,
    the shortest chains that allow it are best for all other tiers, so trying every tier and length
    as the limit finds the best lengths.

    Tiers that speculate, and requests without a TPOT SLO, take part in every step. A tier that
    decodes plainly takes part with the tokens that are due before the step's end, earliest deadline
    first (Algorithm 2): one per TPOT SLO, however short the steps are. All requests are due in the
    first step, which must hold them. [FIX] the printed condition of Algorithm 2 takes tokens that
    are due later, until the step is full.

    TPOT SLOs are met on average only where a tier speculates. [FIX] a step may be shorter than its
    limit: where ``max_tokens`` or the curve keeps it from filling the limit, waiting gains nothing.

    Args:
        step_s: seconds of a step without drafting, by its number of tokens.
        tpot_slos_s: [tiers] seconds per output token; inf: no TPOT SLO, one token per step.
        counts: [tiers] decoding requests.
        acceptance: a in [0, 1], the probability that a token of a chain is accepted after its
            parent.
        max_len: longest chain, at least 1.
        max_tokens: maximum tokens of a step.
        draft_level_s: seconds that each token of the longest chain after the first adds to a step.
        slacks_s: [tiers] seconds by which this step may be longer or, if negative, must be shorter.
            A request x seconds behind its SLO catches up with -x; the paper asks for faster service
            but gives no formula.
        request_s: seconds that each decoding request adds to a step, whatever its tokens.

    Returns:
        None if the TPOT SLOs cannot be met even without prefill.
    """
    tokens = np.arange(1, max_tokens + 1)
    seconds = np.maximum.accumulate(step_s(tokens))
    is_used = np.array([count > 0 for count in counts], dtype=np.bool_)  # [tiers]
    num_decoding = np.asarray(counts, dtype=np.int64)[is_used]
    slos_s = np.asarray(tpot_slos_s, dtype=np.float64)[is_used]
    accepted = np.cumsum(np.power(float(acceptance), np.arange(max_len)))  # Acc(1), Acc(2), ...
    paces = slos_s[:, None] * accepted  # [tiers, max_len] seconds that a step may last
    if slacks_s is not None:
        paces += np.asarray(slacks_s, dtype=np.float64)[is_used, None]
    limits = (
        np.unique(paces[np.isfinite(slos_s)]) if np.isfinite(slos_s).any() else np.array([np.inf])
    )
    lengths = 1 + np.count_nonzero(paces < limits[:, None, None], axis=2)  # [limits, tiers]
    longest = lengths.max(axis=1, initial=1)
    loads = lengths @ num_decoding
    # [limits, tiers] bool: the tier decodes plainly, so its requests take part only when a token is
    # due
    is_due = (lengths == 1) & np.isfinite(slos_s)
    due = is_due @ (num_decoding / slos_s)  # tokens per second
    # Seconds of a step beside those of its tokens, and the share that due tokens' requests leave.
    fixed_s = (longest - 1) * draft_level_s + request_s * (~is_due @ num_decoding)
    share_left = np.maximum(1.0 - request_s * due, 0.0)
    # tokens of the largest step within each limit
    last = np.searchsorted(seconds, limits * share_left - fixed_s, side="right")
    tokens = tokens[: last.max()]
    seconds = seconds[: last.max()]
    is_step = (tokens >= np.maximum(loads, 1)[:, None]) & (tokens <= last[:, None])
    # no length is enough for some limits, as Acc(s) never exceeds 1 / (1 - a)
    is_step &= (longest <= max_len)[:, None]
    loads = (lengths * ~is_due) @ num_decoding  # tokens per step
    per_s = share_left[:, None] / (seconds + fixed_s[:, None])  # steps per second
    rates = (tokens - loads[:, None]) * per_s - due[:, None]
    # rates are negative only by rounding
    rates = np.where(is_step, np.maximum(rates, 0.0), -np.inf)
    rates = rates.max(axis=1, initial=-np.inf)
    best = int(np.argmax(rates))
    if rates[best] == -np.inf:
        return None
    by_tier = np.zeros(len(counts), dtype=np.int64)
    by_tier[is_used] = lengths[best]
    return SpecLengths(by_tier, float(limits[best]), float(rates[best]))


Counts = tuple[int, ...]  # decoding requests by tier
# prompt tokens per second that can be prefilled beside these requests; negative: they miss their
# TPOT SLOs
PrefillRate = Callable[[Counts], float]

FAR_S = 1e9  # upper bound of deadlines in seconds, so that no product with infinity arises


@functools.lru_cache(maxsize=4096)
def prefill_rate(
    step_s: StepTime,
    tpot_slos_s: tuple[float, ...],
    counts: Counts,
    acceptance: float,
    max_len: int,
    max_tokens: int,
    draft_level_s: float = 0.0,
    request_s: float = 0.0,
) -> float:
    """Return the highest prefill rate with which all decoding requests keep their TPOT SLOs.

    This is a fluid approximation of PB*(t, n) / t in the paper: t need not hold a whole number of
    steps. See :func:`~hf_slospec.scheduler.admission.best_lengths` for the arguments.

    Returns:
        Prompt tokens per second, at least 0; -inf if the TPOT SLOs cannot be met even without
        prefill.
    """
    best = best_lengths(
        step_s, tpot_slos_s, counts, acceptance, max_len, max_tokens, draft_level_s, None, request_s
    )
    return -np.inf if best is None else best.rate


@dataclass(frozen=True)
class Candidate:
    """Request whose prompt is not prefilled yet, as the dynamic programme sees it."""

    deadline_s: float  # seconds from now until its prompt must be prefilled
    prompt_tokens: int  # prompt tokens that are still to be prefilled
    kv_tokens: int  # K/V slots that it needs
    tier: int  # index of its tightest TPOT SLO among the tiers
    priority: int = 0  # candidates with lower numbers are admitted first
    # relative value (v_i in the paper) of meeting its SLOs, within its priority; positive
    value: int = 1
    # admitted before and still in prefill, so it stays admitted and keeps its K/V slots
    is_forced: bool = False


def admitted(
    candidates: Sequence[Candidate], rate: PrefillRate, running: Counts, kv_free: int
) -> list[int]:
    """Return the most valuable set of candidates that all meet their deadlines (SLOs-Serve, section
    3.2.1).

    Prompts are processed earliest deadline first, as fast as ``rate`` allows beside the decoding
    requests: those running now, none of which is assumed to finish, and every admitted candidate
    from its deadline on. The budget of prompt tokens grows with that rate and carries over. It may
    not be negative after any admitted prompt, nor may ``rate`` be negative at any time.

    The value of a set is the sum of its candidates' values. Priorities are compared
    lexicographically: the set has as much value of the lowest priority number as possible, then as
    much of the next, and so on, as if each value exceeded all values of higher priority numbers
    together. Of equally valuable sets, the one that leaves most capacity for later candidates is
    preferred, then the one with earlier deadlines, then the one with lower indices. Forced
    candidates are always admitted, even if they cannot meet their deadlines or make running
    requests miss their TPOT SLOs; in that case no other candidate is admitted.

    Time grows with the number of candidates N times the number of states: one if all candidates
    fit, else up to N^tiers counts and the different sums of values times the trade-offs between K/V
    cache and budget at each. With equal values there are N^(priorities - 1) sums beside the counts.
    Callers bound N, to a few dozen with two tiers and priorities. ``rate`` is called once per
    distinct counts.

    Args:
        candidates: requests in prefill or waiting for it, in any order.
        rate: prompt tokens per second beside the requests decoding in each tier, see
            :func:`prefill_rate`.
        running: [tiers] requests decoding now.
        kv_free: tokens of K/V cache available to candidates that are not forced.

    Returns:
        Indices of the admitted candidates, ascending, forced ones included.
    """
    # [FIX] equal deadlines are ordered by index
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].deadline_s, i))
    jobs = [candidates[i] for i in order]
    rate = functools.cache(rate)
    kv_free = max(kv_free, 0)
    chosen = None
    # first try to admit all candidates, which usually fit
    for must in ([True] * len(jobs), [job.is_forced for job in jobs]):
        if chosen is None:
            chosen = _best_set(jobs, must, rate, running, kv_free)
    if chosen is None:
        chosen = [number for number, job in enumerate(jobs) if job.is_forced]
    return sorted(order[number] for number in chosen)


def _values(jobs: Sequence[Candidate]) -> list[int]:
    """Return a value for each job that exceeds the sum of the values of all jobs with less
    important priorities.
    """
    values = [0] * len(jobs)
    scale = 1
    for priority in sorted({job.priority for job in jobs}, reverse=True):
        members = [index for index, job in enumerate(jobs) if job.priority == priority]
        for index in members:
            values[index] = scale * jobs[index].value
        scale += sum(values[index] for index in members)
    return values


def _best_set(
    jobs: Sequence[Candidate],
    must: Sequence[bool],
    rate: PrefillRate,
    running: Counts,
    kv_free: int,
) -> list[int] | None:
    """Return the indices of the best feasible set of ``jobs`` with all marked ``must``; None if
    there is none.

    A state describes a set of the jobs so far: its counts (value of the admitted jobs, decoding
    requests by tier) and what it leaves (K/V slots, and prompt tokens that can be prefilled until
    the current deadline). Of states with equal counts, only those are kept that no other dominates
    in both. States are ordered by preference: of two, the one whose set contains the first job they
    differ in comes first.

    Args:
        jobs: candidates sorted by deadline.
        must: [jobs] bool, the job has to be in the set.
    """
    if rate(running) < 0.0:
        return None
    values = _values(jobs)
    counts = np.array([[0, *running]])  # [states, 1 + tiers]
    left = np.array([[float(kv_free), 0.0]])  # [states, 2] K/V slots, prompt tokens
    rates = np.array([rate(running)])  # [states]
    needs = np.array(
        [(0 if job.is_forced else job.kv_tokens, job.prompt_tokens) for job in jobs],
        dtype=np.float64,
    )
    # for each job, and each state after it: the previous state, and whether the job was admitted
    trail: list[tuple[IntArray, IntArray]] = []
    now_s = 0.0
    for index, job in enumerate(jobs):
        deadline_s = min(max(job.deadline_s, now_s), FAR_S)
        left[:, 1] += rates * (deadline_s - now_s)
        now_s = deadline_s

        step = np.zeros(counts.shape[1], dtype=np.int64)
        step[[0, 1 + job.tier]] = values[index], 1
        fitting = np.flatnonzero((np.round(left - needs[index], 6) >= 0.0).all(axis=1))
        joined = counts[fitting] + step
        joined_rates = _rates(joined[:, 1:], rate)
        is_kept = joined_rates >= 0.0
        fitting, joined, joined_rates = fitting[is_kept], joined[is_kept], joined_rates[is_kept]

        skipping = np.arange(0 if must[index] else len(counts))
        parents = np.concatenate([fitting, skipping])
        is_taken = np.repeat([1, 0], [len(fitting), len(skipping)])
        counts = np.concatenate([joined, counts[skipping]])
        rates = np.concatenate([joined_rates, rates[skipping]])
        # Capacity that no later job can use is cut off, so that states that differ in nothing else
        # become equal. Rounding keeps them equal, and admits a prompt that fits exactly in spite of
        # floating-point errors.
        left = np.minimum(
            left[parents] - is_taken[:, None] * needs[index], needs[index + 1 :].sum(axis=0)
        )
        left = np.round(left, 6)

        preferred = np.lexsort((1 - is_taken, parents))
        survivors = preferred[_undominated(counts[preferred], left[preferred])]
        if not len(survivors):
            return None
        counts, left, rates = counts[survivors], left[survivors], rates[survivors]
        trail.append((parents[survivors], is_taken[survivors]))

    # Ties: the first state in order of preference is taken.
    state = int(np.argmax(counts[:, 0]))
    chosen: list[int] = []
    for index in reversed(range(len(jobs))):
        parents, is_taken = trail[index]
        chosen += [index] * int(is_taken[state])
        state = int(parents[state])
    return chosen


def _rates(counts: IntArray, rate: PrefillRate) -> FloatArray:
    """Return ``rate`` of each row of ``counts``, [states, tiers].  -> [states] f64"""
    distinct, inverse = np.unique(counts, axis=0, return_inverse=True)
    return np.array([rate(tuple(row)) for row in distinct.tolist()], dtype=np.float64)[
        inverse.reshape(-1)
    ]


def _undominated(counts: IntArray, left: FloatArray) -> IntArray:
    """Return the ascending indices of states that no state with equal counts dominates in ``left``,
    [states, 2].

    Of states with equal counts and equal ``left``, the first is kept.
    """
    order = np.lexsort((-left[:, 1], -left[:, 0], *counts.T))  # stable
    group = np.cumsum((np.diff(counts[order], axis=0, prepend=counts[order[:1]]) != 0).any(axis=1))
    # Within a group of equal counts, K/V slots descend, so a state survives only if it leaves more
    # prompt tokens than all states before it. Prompt tokens become ranks, higher from group to
    # group, so that one running maximum serves all groups.
    budgets = np.unique(left[order, 1], return_inverse=True)[1].reshape(-1) + group * len(order)
    highest_before = np.maximum.accumulate(np.concatenate(([-1], budgets)))[:-1]
    return np.sort(order[budgets > highest_before])
