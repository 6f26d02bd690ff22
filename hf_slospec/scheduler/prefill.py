"""Number of tokens that a step prefills, and the batches of a ``generate`` call, which prefills all
of its prompts first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.first_tokens import IN_TIME
from hf_slospec.engine.interfaces import Chunk, Schedule
from hf_slospec.request.request import Request
from hf_slospec.scheduler import PrefillName
from hf_slospec.scheduler.guarantees import guarantee_windows, prefill_deadline_s
from hf_slospec.scheduler.window_guarantees import WindowGuarantees
from hf_slospec.tree.tree import FloatArray

# A prompt without a deadline is due after this multiple of the seconds that its prefill takes alone
# (SLOs-Serve's loose SLO)
SLOWDOWN = 5.0
# While no request is late, a step with prefill may take this many times as long as one without
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
    """Return the maximum number of tokens that the next step prefills.

    With the rule ``beside``, it is as many as make no request late or, if that is more, as many as
    are needed to prefill guaranteed prompts in time, even if decoding requests become late: holding
    prompts back only postpones the same work. With ``first`` it is ``max_tokens``, with ``chunked``
    what the tokens of the decoding requests leave of ``max_tokens``.

    Args:
        guaranteed: guaranteed requests in prefill, in the order in which they are prefilled.
        max_tokens: maximum prefill tokens of a step; with the rule ``chunked``, maximum of prefill
            and verified tokens together.
        allowed_s: seconds that the step may take so that no decoding request falls behind.
    """
    if not num_decoding or rule == "first":
        return max_tokens
    if rule == "chunked":
        return max(max_tokens - round(num_decoding * costs.recent.nodes), 0)
    times_s, spare = spare_budget(costs, num_decoding, max_tokens, allowed_s)
    if not guaranteed:
        return spare
    return max(spare, fast_enough(times_s, required_rate(guaranteed, costs, now_s)))


def spare_budget(
    costs: StepCosts, num_decoding: int, max_tokens: int, allowed_s: float
) -> tuple[FloatArray, int]:
    """Return the seconds of steps with 1, 2, ... prefill tokens, [max_tokens] f64, and the largest
    number of prefill tokens with which no request becomes late.
    """
    sizes = np.arange(1, max_tokens + 1)
    times_s = np.maximum.accumulate(costs.step_s(num_decoding, sizes))
    return times_s, within(times_s, min(allowed_s, STALL * costs.step_s(num_decoding)))


def within(times_s: FloatArray, limit_s: float) -> int:
    """Return the largest number of tokens whose step ends within the limit; ``times_s`` holds the
    seconds of steps with 1, 2, ... tokens.
    """
    return int(np.searchsorted(times_s, limit_s, side="right"))


def fast_enough(times_s: FloatArray, rate: float) -> int:
    """Return the smallest number of tokens per step that are prefilled at ``rate`` tokens per
    second or faster; all if no number is.
    """
    is_enough = np.arange(1, len(times_s) + 1) / times_s >= rate
    return int(np.argmax(is_enough)) + 1 if is_enough.any() else len(times_s)


def required_rate(guaranteed: Sequence[Request], costs: StepCosts, now_s: float) -> float:
    """Return the prefill tokens per second with which each prompt, processed in this order, is
    prefilled in time; 0 if there are no requests.

    A prompt without a TTFT or E2E SLO is due :data:`SLOWDOWN` times the seconds of its prefill
    alone after its arrival. A preempted request counts from now, and is due no later than the first
    token of its stage."""
    rate = 0.0
    num_tokens = 0
    for request in guaranteed:
        num_tokens += request.num_uncached
        rate = max(rate, num_tokens / max(IN_TIME * (_due_s(request, costs, now_s) - now_s), 1e-6))
    return rate


def _due_s(request: Request, costs: StepCosts, now_s: float) -> float:
    if request.num_emitted:
        rest_s: float = costs.step_s(0, request.num_uncached)
        return min(now_s + SLOWDOWN * rest_s, request.stage_due_s)
    due_s = prefill_deadline_s(request)
    if due_s < math.inf:
        return due_s
    alone_s: float = costs.step_s(0, request.prompt_len)
    return request.stats.arrived_s + SLOWDOWN * alone_s


# Maximum prefill tokens per request and step of a ``generate`` call; masks grow with its square
CHUNK = 512
# Equal prompts of up to this many tokens are prefilled for every request, which is faster than one
# more step
MIN_SHARED = 32


class CallBatches:
    """Forms the batches of one ``generate`` call: first all prompts are prefilled, then all
    requests decode in every step.
    """

    prefill: PrefillName = "first"

    def __init__(
        self,
        requests: Sequence[Request],
        costs: StepCosts,
        windows: WindowGuarantees,
        shares_prompts: bool,
    ):
        """Begin with no prompt prefilled.

        Args:
            shares_prompts: the target reuses the K/V of equal prompts: of the requests with equal
                prompts, the first is prefilled up to its last token before the others begin.
        """
        self._costs = costs
        self._windows = windows
        self._has_begun = windows.probability is None
        unknown = [each for each in requests if not each.kv.num_cached]
        self._first_of = first_of_equal(unknown) if shares_prompts else {}
        self._firsts = set(self._first_of.values())

    def form(
        self, running: Sequence[Request], rank: object, has_waiting: bool, now_s: float
    ) -> Schedule:
        """Return chunks of all prompts that are not prefilled yet or, once there are none, all
        requests to decode.
        """
        chunks = list[Chunk]()
        for request in running:
            first = self._first_of.get(request)
            # Another request with the same prompt still computes the K/V that this one will reuse.
            waits = first is not None and not first.is_finished and first.num_uncached > 1
            if not (request.is_decoding or waits):
                is_shared = request in self._firsts
                limit = min(CHUNK, max(request.num_uncached - 1, 1)) if is_shared else CHUNK
                chunks.append(Chunk.of(request, limit))
        if chunks:
            return Schedule([], chunks)
        if not self._has_begun:
            guarantee_windows(running, self._costs, self._windows)
            self._has_begun = True
        return Schedule(running)

    def forget(self, request: Request) -> None:
        """Do nothing: a request of a call does not run again after it has ended."""

    def recover(self) -> None:
        """Do nothing, as :meth:`shrink` never makes batches smaller."""

    def shrink(self, num_running: int) -> bool:
        """Return False, since batches of a call never get smaller: it fails if memory does not
        suffice.
        """
        return False


def first_of_equal(requests: Sequence[Request]) -> dict[Request, Request]:
    """Return, for each request whose prompt an earlier request has, too, the first request with
    that prompt, if the one may use the K/V of the other.
    """
    firsts: dict[tuple[str, tuple[int, ...]], Request] = {}
    others: dict[Request, Request] = {}
    for request in requests:
        params = request.params
        if params.prefill is None and request.prompt_len > MIN_SHARED:
            first = firsts.setdefault((params.cache_salt, tuple(params.prompt)), request)
            if first is not request:
                others[request] = first
    return others


def waiting_for_equal(requests: Sequence[Request]) -> dict[Request, Request]:
    """Return the requests whose prefill waits for that of an earlier request with the same prompt,
    each with the earlier one.

    A request waits until all tokens but the last of the earlier one have K/V; if it cannot take the
    K/V of the first tokens, it does not wait any longer.
    """
    new = [each for each in requests if not (each.num_emitted or each.num_unread)]
    return {
        request: first
        for request, first in first_of_equal(new).items()
        if first.num_uncached > 1 and (request.kv.num_cached or first.kv.num_cached < MIN_SHARED)
    }
