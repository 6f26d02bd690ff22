"""The batcher's scheduler as plain lists: every turn looks at all requests that wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hf_slospec.scheduler.continuous import LAST_RANK, STARVING, ContinuousScheduler
from hf_slospec.scheduler.guarantees import guaranteeable, prefill_deadline_s, tightest_tpot_slo_s


class PlainScheduler(ContinuousScheduler):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.waiting = []
        self._undecided = []

    def add(self, request):
        request.is_guaranteed = False
        if request.params.has_slo and not request.params.is_best_effort:
            request.is_guaranteed = self.admission != "slo"
            if not request.is_guaranteed:
                self._undecided.append(request)
        self._queue(request, request.stats.arrived_s)
        self._has_changed = True

    def _queue(self, request, since_s):
        self._waiting_since[request] = since_s
        self.waiting.append(request)

    def _drop(self, request):
        for requests in (self.waiting, self.running, self._undecided):
            if request in requests:
                requests.remove(request)
        self._waiting_since.pop(request, None)
        self.batches.forget(request)
        self._protected.discard(request)

    def decide_guarantees(self, now_s):
        is_lost = self._lost(now_s)
        self._undecided = [request for request in self._undecided if not is_lost(request)]
        if self._has_changed and self._undecided:
            self._has_changed = self._guarantee(self._undecided, now_s)

    def _guarantee(self, undecided, now_s):
        before = [request for request in (*self.running, *self.waiting) if request.is_guaranteed]
        unmovable = [
            *before,
            *(r for r in self.running if r in self._protected and not r.is_guaranteed),
        ]
        places = self.limits.max_batch - len(unmovable)
        if places <= 0:
            return False
        kv_free = self._max_slots - self._expected(unmovable)
        found = guaranteeable(
            undecided,
            before,
            kv_free,
            self._kv_needed,
            self.num_reusable,
            self.costs,
            self.windows,
            now_s,
        )
        found.sort(key=lambda request: (request.params.priority, prefill_deadline_s(request)))
        for request in found[:places]:
            request.is_guaranteed = True
            self._undecided.remove(request)
        return bool(found)

    def _enter(self, now_s):
        preempted = []
        ranks = {request: self._rank(request, now_s) for request in self.waiting}
        for request in sorted(self.waiting, key=ranks.__getitem__):
            may_preempt = ranks[request][0] < LAST_RANK
            victims = self._victims(request, may_preempt)
            if victims is None:
                break
            for victim in victims:
                self._stop_running(victim)
            preempted += victims
            self.waiting.remove(request)
            self.running.append(request)
            del self._waiting_since[request]
            if ranks[request][0] == STARVING:
                self._protected.add(request)
        return preempted


def plain_load_of(scheduler, load):
    """A load with what is summed over requests summed over all of them, those that wait included."""
    unfinished = (*scheduler.running, *scheduler.waiting)
    guaranteed = Counter(
        tightest_tpot_slo_s(request) for request in unfinished if request.is_guaranteed
    )
    return replace(
        load,
        guaranteed=tuple(sorted(guaranteed.items())),
        best_effort=sum(not request.is_guaranteed for request in unfinished),
        prefill_tokens=sum(
            request.num_uncached for request in unfinished if not request.is_decoding
        ),
        kv_free=scheduler.limits.kv_tokens
        - sum(scheduler.limits.kv_needed(request.params) for request in unfinished),
    )
