"""Prefill budget: how many prompt tokens a step prefills beside the decoding requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.first_tokens import IN_TIME
from hf_slospec.request.request import Request
from hf_slospec.scheduler import PrefillName
from hf_slospec.scheduler.guarantees import prefill_deadline_s

SLOWDOWN = 5.0  # without a deadline: multiple of the prompt's time alone (SLOs-Serve's loose SLO)
# Multiple of a step without prefill that a step with prefill may take while no request is late
STALL = 3.0


def prefill_budget(
    rule: PrefillName,
    costs: StepCosts,
    num_decoding: int,
    guaranteed: Sequence[Request],
    max_tokens: int,
    allowed_s: float,
    now_s: float,
) -> int:
    """Return the prefill tokens of the next step.

    The rule ``beside`` takes as many as make no request late, or as many as guaranteed prompts need
    to be prefilled in time if that is more, even if decoding requests become late: holding prompts
        back only postpones the same work.

    Args:
        guaranteed: guaranteed requests in prefill, in the order in which they are prefilled.
        max_tokens: maximum prefill tokens of a step; with the rule ``chunked``, decoded ones count.
        allowed_s: seconds that the step may take so that no decoding request falls behind.
    """
    if not num_decoding or rule == "first":
        return max_tokens
    if rule == "chunked":
        return max(max_tokens - round(num_decoding * costs.recent.nodes), 0)
    sizes = np.arange(1, max_tokens + 1)
    times_s = np.maximum.accumulate(costs.step_s(num_decoding, sizes))
    limit_s = min(allowed_s, STALL * costs.step_s(num_decoding))
    spare = int(np.searchsorted(times_s, limit_s, side="right"))
    is_enough = sizes / times_s >= required_rate(guaranteed, costs, now_s)
    needed = int(np.argmax(is_enough)) + 1 if is_enough.any() else max_tokens
    return max(spare, needed) if guaranteed else spare


def plain_budget(
    costs: StepCosts,
    num_decoding: int,
    guaranteed: Sequence[Request],
    due: Sequence[Request],
    max_tokens: int,
    allowed_s: float,
    steady_s: float,
    now_s: float,
) -> int:
    """Return the prefill tokens of the next step if decoding without drafts keeps all guarantees.

    Guaranteed prompts are prefilled as fast as plain decoding allows at a steady pace, or faster,
    but never so fast that a window breaks, if they are due: speculation waits for them. Others get
        what a step with drafts leaves.

    Args:
        due: those of the guaranteed requests that have to be prefilled in time.
        allowed_s: seconds that the step may take so that no window breaks.
        steady_s: seconds that every step may take.
        The others are those of :func:`prefill_budget`.
    """
    if not num_decoding:
        return max_tokens
    sizes = np.arange(1, max_tokens + 1)
    limit_s = min(allowed_s, STALL * costs.step_s(num_decoding))
    spare = int(
        np.searchsorted(
            np.maximum.accumulate(costs.step_s(num_decoding, sizes)), limit_s, side="right"
        )
    )
    if not guaranteed:
        return spare
    seconds = costs.verify_s(num_decoding + sizes, num_decoding, num_decoding * costs.recent.keys)
    plain_s = np.maximum.accumulate(seconds)
    most, steady = (
        int(np.searchsorted(plain_s, min(allowed_s, at_s), side="right"))
        for at_s in (math.inf, steady_s)
    )
    is_enough = sizes / plain_s >= required_rate(due, costs, now_s)
    needed = int(np.argmax(is_enough)) + 1 if is_enough.any() else max_tokens
    num_tokens = sum(request.num_uncached for request in guaranteed)
    return max(min(max(steady, min(needed, most)), num_tokens), spare)


def required_rate(guaranteed: Sequence[Request], costs: StepCosts, now_s: float) -> float:
    """Return the prefill tokens per second at which each prompt, in this order, is prefilled in
    time; 0 without any.

    Prompts without a TTFT or E2E SLO are due after :data:`SLOWDOWN` times their time alone, counted
    from arrival, or from now if the request was preempted, then no later than the first token of
    its stage."""
    rate = 0.0
    num_tokens = 0
    for request in guaranteed:
        num_tokens += request.num_uncached
        rate = max(rate, num_tokens / max(IN_TIME * (_due_s(request, costs, now_s) - now_s), 1e-6))
    return rate


def _due_s(request: Request, costs: StepCosts, now_s: float) -> float:
    if request.num_emitted:
        return min(now_s + SLOWDOWN * costs.step_s(0, request.num_uncached), request.stage_due_s)
    due_s = prefill_deadline_s(request)
    return (
        due_s
        if due_s < math.inf
        else request.stats.arrived_s + SLOWDOWN * costs.step_s(0, request.prompt_len)
    )
