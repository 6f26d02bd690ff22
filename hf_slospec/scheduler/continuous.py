"""The scheduler: SLO guarantees, K/V slots, preemption; ``batch_formation.py`` forms batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.interfaces import Schedule
from hf_slospec.request.request import Request
from hf_slospec.scheduler import AdmissionName, PrefillName
from hf_slospec.scheduler.batch_formation import BatchFormation
from hf_slospec.scheduler.guarantees import (
    MAX_CANDIDATES,
    guaranteeable,
    lost_s,
    possible_slos,
    prefill_deadline_s,
    tightest_tpot_slo_s,
)
from hf_slospec.scheduler.prefill import CHUNK, CallBatches
from hf_slospec.scheduler.queue import Undecided, WaitingQueue
from hf_slospec.scheduler.slots import Limits as Limits
from hf_slospec.scheduler.slots import Slots, in_order_of_preemption
from hf_slospec.scheduler.window_guarantees import WindowGuarantees

STARVING = 0  # first queue rank: requests that have waited for ``starvation_s``
LAST_RANK = 2  # last queue rank: best-effort requests, which preempt no others
MAX_PREEMPTED = 3  # preemptions after which a request is not preempted for other requests any more
OUTPUT_WEIGHT = 0.1  # weight of the latest finished request in the average output length


class ContinuousScheduler(Slots):
    """Scheduler for continuous batching with chunked prefill in the same forward as decoding.

    Admission ``slo`` guarantees the SLOs of the requests that SLOs-Serve's dynamic programme
    selects; ``edf``, ``fcfs`` and ``priority`` guarantee all SLOs and serve requests by earliest
    deadline, arrival or priority. Other requests are best effort: they use the leftover budget, and
    are preempted if a guaranteed request needs their K/V slots; their tokens are kept. A request
    that has waited ``starvation_s`` goes first and is then not preempted for others.

    Guaranteed requests have K/V slots for their maximum length. That is often far more than a
    request emits, so best-effort requests are admitted with slots for the average output of recent
    requests; if slots run out, those that arrived last are preempted. Each time that a request is
    preempted it is expected to emit twice as much."""

    def __init__(
        self,
        limits: Limits,
        costs: StepCosts,
        admission: AdmissionName = "slo",
        prefill: PrefillName = "beside",
        num_reusable: Callable[[Request], int] = lambda request: 0,
        guarantee: float | None = None,
        falls_back: bool = False,
        shares_prompts: bool = False,
    ):
        """Create an empty scheduler.

        Args:
            num_reusable: ``Target.num_reusable``, the tokens of a request whose K/V can be reused.
            guarantee: probability with which guaranteed requests keep their TTFT SLOs, and their
                TPOT SLOs over every window of ten tokens; None: no probability is stated.
            falls_back: ``Policy.falls_back``: the policy decodes plainly where time is short.
            shares_prompts: the target reuses the K/V of equal prompts, see
                :func:`waiting_for_equal`.
        """
        super().__init__(limits, costs)
        self.num_reusable = num_reusable
        self.windows = WindowGuarantees(guarantee, costs.recent, falls_back)
        self.admission = admission
        self.batches: BatchFormation | CallBatches = BatchFormation(
            limits.prefill_chunk, costs, admission, prefill, self.windows, shares_prompts
        )
        self.waiting = WaitingQueue(self._rank, self._next_rank_s)
        # Requests that are best effort until their SLOs can be guaranteed.
        self._undecided = Undecided()
        self._guaranteed_waiting: dict[Request, None] = {}
        self._waiting_since: dict[Request, float] = {}
        self._protected: set[Request] = set()  # requests that are not preempted for other requests
        self._has_changed = False  # requests came or left since the last decision on guarantees
        # slots up to which requests are admitted; fewer than ``kv_tokens`` after memory ran out
        self._max_slots = limits.kv_tokens
        self._busy_until_s = -math.inf  # end of the latest step that decoded

    @classmethod
    def of_call(
        cls,
        requests: Sequence[Request],
        costs: StepCosts,
        guarantee: float | None = None,
        shares_prompts: bool = False,
    ) -> ContinuousScheduler:
        """Return the scheduler of one ``generate`` call, whose requests all run from the beginning.

        K/V slots are not limited. See :class:`CallBatches` for ``shares_prompts``.
        """
        limits = Limits(len(requests), sys.maxsize, 0, CHUNK, math.inf)
        scheduler = cls(limits, costs, guarantee=guarantee)
        scheduler.batches = CallBatches(requests, costs, scheduler.windows, shares_prompts)
        scheduler.running = list(requests)
        return scheduler

    def add(self, request: Request) -> None:
        """Queue a request. With admission ``slo``, its SLOs are not guaranteed yet."""
        may_guarantee = request.params.has_slo and not request.params.is_best_effort
        request.is_guaranteed = may_guarantee and self.admission != "slo"
        if may_guarantee and not request.is_guaranteed:
            self._undecided.add(request)
        self._queue(request, request.stats.arrived_s)
        self._has_changed = True
        self._count_arrival(request)

    def _count_arrival(self, request: Request) -> None:
        """Record the TTFT SLO of a new request, or inf if no step can delay its first token."""
        ttft_slo_s = request.params.ttft_slo_s
        arrived_s = request.stats.arrived_s
        if ttft_slo_s is None or request.stats.num_resumed or arrived_s > self._busy_until_s:
            self.costs.first_tokens.arrived(math.inf, 0)
        else:
            self.costs.first_tokens.arrived(
                ttft_slo_s, request.num_uncached - self.num_reusable(request)
            )

    def _queue(self, request: Request, since_s: float) -> None:
        self._waiting_since[request] = since_s
        self.waiting.put(request)
        if request.is_guaranteed:
            self._guaranteed_waiting[request] = None

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self._guaranteed_waiting.pop(request, None)
        self._waiting_since.pop(request, None)

    def offer(self, request: Request, now_s: float) -> bool:
        """Queue a request if its SLOs can be guaranteed now or it has none; return whether it was
        queued.
        """
        self.add(request)
        if request in self._undecided and not self._guarantee([request], now_s):
            self._drop(request)
            request.is_guaranteed = None  # another engine may guarantee it
            return False
        return True

    def remove(self, request: Request) -> None:
        """Remove a request that has finished, failed or was cancelled."""
        self._drop(request)
        if request.finish_reason in ("stop", "length"):
            self.output_tokens += OUTPUT_WEIGHT * (max(request.num_emitted, 1) - self.output_tokens)
            self.windows.output_tokens = self.output_tokens
        self.windows.end(request)
        self._has_changed = True
        self._max_slots = self.limits.kv_tokens

    def _drop(self, request: Request) -> None:
        self._dequeue(request)
        self._undecided.remove(request)
        if request in self.running:
            self.running.remove(request)
        self.batches.forget(request)
        self._protected.discard(request)

    def observe(self, step: StepEvent) -> None:
        """Let batches grow again after a step that fitted into memory, and learn from guaranteed
        windows that it missed.
        """
        self.batches.recover()
        ended_s = step.begun_s + step.phases.total_s
        if step.num_decoding:
            self._busy_until_s = ended_s
        self.windows.observe(ended_s)

    def enter(self, now_s: float) -> list[Request]:
        """Give guarantees and K/V slots to waiting requests, in order of rank; return the requests
        that were preempted.
        """
        self.decide_guarantees(now_s)
        # ``_expected`` counts at least what the next step may emit, so slots can lack only if it
        # exceeds them.
        preempted = (
            self._make_room() if self._expected(self.running) > self.limits.kv_tokens else []
        )
        preempted += self._enter(now_s)
        for request in preempted:  # only now, so that none of them enters again before the step
            self._queue(request, now_s)
        return preempted

    def schedule(self, now_s: float) -> Schedule:
        """Return the decoding requests and the prefill of the next step."""
        return self.batches.form(self.running, self._rank, len(self.waiting) > 0, now_s)

    # ---- guarantees

    def decide_guarantees(self, now_s: float) -> None:
        """Guarantee the SLOs of undecided requests that can be met. Requests that can no longer
        keep their TTFT SLO stay best effort.
        """
        if not len(self._undecided):
            return
        is_lost = self._lost(now_s)
        # ``Undecided.earliest`` checks the waiting requests, but as few as possible of them.
        for request in [
            request for request in self.running if request in self._undecided and is_lost(request)
        ]:
            self._undecided.remove(request)
        if self._has_changed and len(self._undecided):
            is_possible = possible_slos(self.costs, self.windows)
            earliest = self._undecided.earliest(MAX_CANDIDATES, is_possible, is_lost)
            self._has_changed = self._guarantee(earliest, now_s)

    def _lost(self, now_s: float) -> Callable[[Request], bool]:
        """Return a function that returns whether it is too late to guarantee a request's SLOs."""
        chunk = self.limits.prefill_chunk
        fastest = chunk / self.costs.step_s(0, chunk)  # tokens per second

        def is_lost(request: Request) -> bool:
            left_s = prefill_deadline_s(request) - now_s
            return self.windows.is_too_late(request) or (
                not request.num_emitted
                and request.num_uncached
                > fastest * left_s  # cheap test first, since num_reusable is slow
                and request.num_uncached - self.num_reusable(request) > fastest * left_s
            )

        return is_lost

    def _guarantee(self, undecided: Sequence[Request], now_s: float) -> bool:
        """Guarantee the SLOs of those undecided requests for which admission control allows it;
        return whether there are any.
        """
        if not undecided:
            return False
        guaranteed = [
            *(request for request in self.running if request.is_guaranteed),
            *self._guaranteed_waiting,
        ]
        protected = [r for r in self.running if r in self._protected and not r.is_guaranteed]
        unmovable = [*guaranteed, *protected]
        max_admitted = self.limits.max_batch - len(unmovable)
        if max_admitted <= 0:
            return False
        kv_free = self._max_slots - self._expected(unmovable)
        admitted = guaranteeable(
            undecided,
            guaranteed,
            kv_free,
            self._kv_needed,
            self.num_reusable,
            self.costs,
            self.windows,
            now_s,
        )
        if len(admitted) < len(undecided):
            self.windows.refused_s = now_s
        admitted.sort(key=lambda request: (request.params.priority, prefill_deadline_s(request)))
        for request in admitted[:max_admitted]:
            request.is_guaranteed = True
            self.windows.give(request, tightest_tpot_slo_s(request), now_s)
            self._undecided.remove(request)
            if request in self.waiting:
                self._queue(request, self._waiting_since[request])
        return bool(admitted)

    # ---- slots

    def _make_room(self) -> list[Request]:
        """Preempt best-effort requests until the K/V slots suffice for all that the next step may
        emit; return the preempted requests.

        Requests of the least important priority that arrived last go first, and protected requests
        only if no others are left."""
        lacking = self._after_step(self.running) - self.limits.kv_tokens
        preempted = list[Request]()
        soft = in_order_of_preemption(
            request for request in self.running if not request.is_guaranteed
        )
        for request in sorted(soft, key=self._protected.__contains__):
            if lacking <= 0:
                break
            lacking -= self._after_step([request])
            preempted.append(request)
        for request in preempted:
            self._stop_running(request)
        return preempted

    def _enter(self, now_s: float) -> list[Request]:
        """Move waiting requests to ``running`` in order of rank while K/V slots suffice; return the
        requests that were preempted for them.
        """
        preempted: list[Request] = []
        while (first := self.waiting.first(now_s)) is not None:
            rank, request = first
            may_preempt = rank[0] < LAST_RANK
            victims = self._victims(request, may_preempt)
            if victims is None:
                break  # no request overtakes it, or a large request would never get enough slots
            for victim in victims:
                self._stop_running(victim)
            preempted += victims
            self._dequeue(request)
            self.running.append(request)
            if request.stats.entered_s is None:
                request.stats.entered_s = now_s
            if request in self._undecided and self._lost(now_s)(request):
                self._undecided.remove(request)
            if rank[0] == STARVING:
                self._protected.add(request)
        return preempted

    def _rank(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Return the queue rank of a request, a sort key: starving requests come first, then
        guaranteed ones, then best-effort requests, of which those that have missed their SLO come
        last.
        """
        waiting_since_s = self._waiting_since.get(request)
        priority = request.params.priority
        since_s = request.stats.arrived_s if waiting_since_s is None else waiting_since_s
        if waiting_since_s is not None and now_s >= since_s + self.limits.starvation_s:
            return STARVING, priority, since_s, request.index
        if request.is_guaranteed:
            is_by_deadline = self.admission in ("slo", "edf")
            due_s = prefill_deadline_s(request) if is_by_deadline else since_s
            return 1, priority, due_s, since_s, request.index
        is_too_late = not request.num_emitted and now_s > lost_s(request)
        return LAST_RANK, priority, is_too_late, since_s, request.index

    def _next_rank_s(self, request: Request, now_s: float) -> float:
        """Return the time at which the rank of a waiting request changes next; inf: never."""
        starves_s = self._waiting_since[request] + self.limits.starvation_s
        too_late_s = math.nextafter(lost_s(request), math.inf)
        return min(
            (change_s for change_s in (starves_s, too_late_s) if change_s > now_s), default=math.inf
        )

    def _victims(self, request: Request, may_preempt: bool) -> list[Request] | None:
        """Return the running requests to preempt so that the request fits; None if it cannot fit.

        If ``may_preempt``, running requests only need room for the next step; otherwise, for all
        the tokens that they are expected to emit."""
        needed_by = self._after_step if may_preempt else self._expected
        spare = self._spare(request.params.priority) if may_preempt else []
        # one request alone always fits
        max_slots = self._max_slots if self.running else self.limits.kv_tokens
        free = max_slots - needed_by(self.running) - self._expected([request])
        num_left = self.limits.max_batch - len(self.running)
        for count in range(len(spare) + 1):
            if num_left + count > 0 and free >= 0:
                return spare[:count]
            free += needed_by(spare[count : count + 1])
        return None

    def _spare(self, priority: float = math.inf) -> list[Request]:
        """Return the running requests that a request of this priority may preempt, in order of
        preemption.
        """
        limit = priority if self.admission == "priority" else math.inf
        movable = (request for request in self.running if request not in self._protected)
        spare = [
            request
            for request in movable
            if request.is_best_effort or request.params.priority > limit
        ]
        return in_order_of_preemption(spare)

    def preempt(self, request: Request, now_s: float) -> None:
        """Move a running request back to the queue; it keeps its tokens, and the engine drops its
        K/V.
        """
        self._stop_running(request)
        self._queue(request, now_s)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.batches.forget(request)
        request.stats.num_preempted += 1
        if request.stats.num_preempted >= MAX_PREEMPTED:
            self._protected.add(request)

    # ---- memory

    def relieve(self, now_s: float) -> list[Request]:
        """Preempt half of the requests that may be preempted, after memory ran out, and admit no
        request until one has finished.

        Returns:
            The preempted requests; none if at most one request or no preemptible one is running.
        """
        spare = self._spare()
        victims = spare[: min((len(spare) + 1) // 2, len(self.running) - 1)]
        for request in victims:
            self.preempt(request, now_s)
        self._max_slots = min(self._expected(self.running), self.limits.kv_tokens)
        return victims

    def shrink(self) -> bool:
        """Halve the size of the next batches; return False if it is already down to one request or
        token per step.
        """
        return self.batches.shrink(len(self.running))
