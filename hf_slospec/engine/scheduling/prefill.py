"""How much of waiting prompts goes through a step beside those that decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling import PrefillName
from hf_slospec.engine.scheduling.admission import prefill_deadline_s
from hf_slospec.engine.scheduling.pace import Pace

IN_TIME = 0.95  # of the time to its deadline a prompt should be through in
SLOWDOWN = 5.0  # times what a prompt takes alone is soon enough (SLOs-Serve's loose target)
STALL = 3.0  # times a step without prefill: what a prompt may make of it where nobody is late


def num_prefill_tokens(
    rule: PrefillName,
    pace: Pace,
    num_decoding: int,
    promised: Sequence[Request],
    most: int,
    allowed_s: float,
    now_s: float,
) -> int:
    """Prefill tokens of the next step.

    By the rule ``beside``: as many as make nobody late, and as many as promised prompts need to be through in time,
    whoever becomes late. Prompts kept back are work kept back; nobody is served better while they pile up.

    Args:
        promised: requests in prefill that targets were promised to, in the order they are fed.
        most: tokens of a step; with ``chunked``, those that decode count.
        allowed_s: seconds the step may take so that nobody who decodes falls behind.
    """
    if not num_decoding or rule == "first":
        return most
    if rule == "chunked":
        return max(most - round(num_decoding * pace.nodes), 0)
    sizes = np.arange(1, most + 1)
    times_s = np.maximum.accumulate(pace.step_s(num_decoding, sizes))
    limit_s = min(allowed_s, STALL * float(pace.step_s(num_decoding)))
    spare = int(np.searchsorted(times_s, limit_s, side="right"))
    is_enough = sizes / times_s >= tokens_per_s(promised, pace, now_s)
    needed = int(np.argmax(is_enough)) + 1 if is_enough.any() else most
    return max(spare, needed) if promised else spare


def tokens_per_s(promised: Sequence[Request], pace: Pace, now_s: float) -> float:
    """The rate at which prompts must be fed, in this order, so that each is through in time; 0 without any.

    Those without a target for the first token should be through in :data:`SLOWDOWN` times what they take alone, and so
    should those that lost their K/V and are fed once more, from now on.
    """
    rate, behind = 0.0, 0
    for request in promised:
        behind += request.num_uncached
        rate = max(rate, behind / max(IN_TIME * (_due_s(request, pace, now_s) - now_s), 1e-6))
    return rate


def _due_s(request: Request, pace: Pace, now_s: float) -> float:
    if request.num_emitted:
        return now_s + SLOWDOWN * float(pace.step_s(0, request.num_uncached))
    if request.ttft_slo_s is None:
        return request.arrived_s + SLOWDOWN * float(pace.step_s(0, request.prompt_len))
    return prefill_deadline_s(request)
