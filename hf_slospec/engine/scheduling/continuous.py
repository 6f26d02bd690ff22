"""Whose turn it is where requests come and go: promises, room, prefill chunks beside decoding requests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Chunk, Schedule
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling import AdmissionName, LimitSettings, PrefillName
from hf_slospec.engine.scheduling.admission import prefill_deadline_s, promised
from hf_slospec.engine.scheduling.pace import Pace
from hf_slospec.engine.scheduling.prefill import num_prefill_tokens

LAST_RANK = 2  # in the queue: of those that may preempt nobody
MIN_CHUNK = 16  # prefill tokens of a step, however late others are: of promised requests, of others now and then
AHEAD = 0.95  # of a target is what a promised request is kept up to
SAVES = 1.05  # sitting best-effort requests out must save at least this factor of a step
MAX_PREEMPTED = 3  # times, then it keeps its room
MAX_SITS = 8  # steps in a row that best-effort requests sit out for promised ones


@dataclass(frozen=True)
class Limits:
    """What may be used."""

    max_batch: int  # requests that hold K/V
    kv_tokens: int  # slots of them together
    max_nodes: int  # staged by a request in a step
    prefill_chunk: int  # tokens of a step
    starvation_s: float  # a best-effort request that waited so long goes first

    @classmethod
    def of(cls, config: LimitSettings, kv_tokens: int, max_nodes: int) -> Limits:
        return cls(config.max_batch, kv_tokens, max_nodes, config.prefill_chunk, config.starvation_s)

    def kv_needed(self, request: Request) -> int:
        """Slots of the request's K/V at its longest."""
        return request.prompt_len + request.max_new_tokens + self.max_nodes


class ContinuousScheduler:
    """Continuous batching with chunked prefill in the same forward as decoding.

    Requests with targets are promised them, or not, by SLOs-Serve's dynamic programme (``slo``), or all are, served
    earliest deadline first (``edf``), as they came (``fcfs``) or by priority. Others get what is left: they are best
    effort, and lose their K/V where a promise needs the room, though not their tokens. One that waited ``starvation_s``
    goes first and keeps its room from then on.
    """

    def __init__(self, limits: Limits, pace: Pace, admission: AdmissionName = "slo", prefill: PrefillName = "beside"):
        self.limits, self.pace, self.admission, self.prefill = limits, pace, admission, prefill
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._undecided: list[Request] = []  # waiting or running as best effort until their targets can be promised
        self._waiting_since: dict[Request, float] = {}  # of those that wait
        self._protected: set[Request] = set()  # best effort, but waited too long before
        self._sits: dict[Request, int] = {}  # steps in a row that a running request sat out
        self._has_changed = False
        self._share = 1.0  # of the work of a step that memory allows
        self._kv_limit = limits.kv_tokens

    def add(self, request: Request) -> None:
        self._waiting_since[request] = request.arrived_s
        if not request.has_slo:
            request.is_best_effort = True
        elif not request.is_best_effort:
            request.is_guaranteed = self.admission != "slo"
            request.is_best_effort = not request.is_guaranteed
            if request.is_best_effort:
                self._undecided.append(request)
        self.waiting.append(request)
        self._has_changed = True

    def remove(self, request: Request) -> None:
        for requests in (self.waiting, self.running, self._undecided):
            if request in requests:
                requests.remove(request)
        for book in (self._waiting_since, self._sits):
            book.pop(request, None)
        self._protected.discard(request)
        self._has_changed, self._kv_limit = True, self.limits.kv_tokens

    def observe(self, step: StepEvent) -> None:
        self.pace.observe(step)
        self._share = min(1.0, self._share * 1.05)

    def schedule(self, now_s: float) -> Schedule:
        self.promise(now_s)
        preempted = self._enter(now_s)
        decoding = [request for request in self.running if request.is_decoding]
        allowed_s = self._allowed_s(decoding, now_s)
        decoding = self._taking_part(decoding, allowed_s)
        chunks = self._chunks(decoding, allowed_s, now_s)
        return Schedule([] if chunks and self.prefill == "first" else decoding, chunks, preempted)

    @property
    def kv_held(self) -> int:
        """Slots that running requests may come to hold."""
        return self._held(self.running)

    def _held(self, requests: Iterable[Request]) -> int:
        return sum(map(self.limits.kv_needed, requests))

    # ---- promises

    def promise(self, now_s: float) -> None:
        """Promise targets to those undecided requests whose targets can be met; give up those whose cannot any more."""
        if not self._undecided:
            return
        fastest = self.limits.prefill_chunk / float(self.pace.step_s(0, self.limits.prefill_chunk))  # tokens per second
        for request in list(self._undecided):
            if not request.num_emitted and now_s + request.num_uncached / fastest > prefill_deadline_s(request):
                self._undecided.remove(request)  # it stays best effort
        before = [request for request in (*self.running, *self.waiting) if request.is_guaranteed]
        unmovable = [*before, *(request for request in self.running if request in self._protected)]
        places = self.limits.max_batch - len(unmovable)
        if not self._has_changed or not self._undecided or places <= 0:
            return
        kv_free = self._kv_limit - self._held(unmovable)
        found = promised(self._undecided, before, kv_free, self.limits.kv_needed, self.pace, now_s)
        found.sort(key=lambda request: (-request.priority, prefill_deadline_s(request)))
        for request in found[:places]:
            request.is_guaranteed, request.is_best_effort = True, False
            self._undecided.remove(request)
        self._has_changed = bool(found)  # more than were looked at may wait

    # ---- room

    def _enter(self, now_s: float) -> list[Request]:
        """Let waiting requests in, in order, as far as there is room.  -> those that lost theirs"""
        preempted: list[Request] = []
        highest = max((request.priority for request in self.waiting), default=0)
        if len(self.running) >= self.limits.max_batch and not self._spare(highest):
            return preempted
        ranks = {request: self._rank(request, now_s) for request in self.waiting}
        for request in sorted(self.waiting, key=ranks.__getitem__):
            may_preempt = ranks[request][0] < LAST_RANK
            victims = self._victims(request, self._spare(request.priority) if may_preempt else [])
            if victims is None:
                break  # nobody overtakes it, or a large request would never find room
            for victim in victims:
                self.preempt(victim, now_s)
                preempted.append(victim)
            self.waiting.remove(request)
            self.running.append(request)
            del self._waiting_since[request]
            if request.is_best_effort and may_preempt:
                self._protected.add(request)
        return preempted

    def _rank(self, request: Request, now_s: float) -> tuple[float, ...]:
        """Place in the queue: those that starve, those with promises, the rest; of these the ones too late last."""
        due_s, waiting_since_s = prefill_deadline_s(request), self._waiting_since.get(request)
        came_s = request.arrived_s if waiting_since_s is None else waiting_since_s
        if waiting_since_s is not None and now_s - came_s >= self.limits.starvation_s:
            return 0, -request.priority, came_s, request.index
        if request.is_guaranteed:
            return 1, -request.priority, due_s if self.admission in ("slo", "edf") else came_s, came_s, request.index
        is_too_late = not request.num_emitted and now_s > due_s
        return LAST_RANK, -request.priority, is_too_late, came_s, request.index

    def _victims(self, request: Request, spare: list[Request]) -> list[Request] | None:
        """Those of ``spare`` to preempt, in this order, so that the request fits; None if all are not enough."""
        places = self.limits.max_batch - len(self.running)
        slots = (self._kv_limit if self.running else self.limits.kv_tokens) - self.kv_held
        for count in range(len(spare) + 1):
            if places > 0 and slots >= self.limits.kv_needed(request):
                return spare[:count]
            if count < len(spare):
                places, slots = places + 1, slots + self.limits.kv_needed(spare[count])
        return None

    def _spare(self, priority: float = -math.inf) -> list[Request]:
        """Running requests that may lose their room to one of this priority, the first to lose it first."""
        lower = priority if self.admission == "priority" else -math.inf
        spare = [r for r in self.running if (r.is_best_effort or r.priority < lower) and r not in self._protected]
        return sorted(spare, key=lambda request: (request.priority, -request.arrived_s, -request.index))

    def preempt(self, request: Request, now_s: float) -> None:
        """Back to the queue; its tokens stay, its K/V is the engine's to drop."""
        self.running.remove(request)
        self.waiting.append(request)
        self._sits.pop(request, None)
        self._waiting_since[request] = now_s
        request.num_preempted += 1
        if request.num_preempted >= MAX_PREEMPTED:
            self._protected.add(request)

    # ---- the step

    def _taking_part(self, decoding: list[Request], allowed_s: float) -> list[Request]:
        """Those that decode now: best-effort requests sit out while they would make promised ones late."""
        if self._share < 1.0:  # after running out of memory: by turns
            by_turns = sorted(decoding, key=lambda request: -self._sits.get(request, 0))
            kept = set(by_turns[: max(math.ceil(self._share * len(decoding)), 1)])
        else:
            must = [request for request in decoding if not request.is_best_effort]
            spare = [request for request in decoding if request.is_best_effort]
            least_s = float(self.pace.step_s(max(len(must), 1)))
            times_s = self.pace.step_s(len(must) + np.arange(1, len(spare) + 1))
            num_spare = int(np.count_nonzero(times_s <= max(allowed_s, SAVES * least_s)))
            spare.sort(key=lambda request: -self._sits.get(request, 0))  # stable: else as they came
            kept = {*must, *spare[: max(num_spare, math.ceil(len(spare) / (MAX_SITS + 1)))]}
        for request in decoding:
            self._sits[request] = 0 if request in kept else self._sits.get(request, 0) + 1
        return [request for request in decoding if request in kept]

    def _allowed_s(self, decoding: list[Request], now_s: float) -> float:
        """Seconds the step may take so that no promised request falls behind its target; 0 where one has already.

        Those whose targets are lost even if they decode alone from now on do not count.
        """
        allowed_s, alone_s = math.inf, float(self.pace.step_s(1)) / self.pace.tokens
        for request in decoding:
            if request.tpot_slo_s is None or not request.is_guaranteed or self.admission in ("fcfs", "priority"):
                continue
            elapsed_s, emitted = request.decoded(now_s)
            num_left = request.num_left_in_stage
            if request.tpot_slo_s * (emitted + num_left) - elapsed_s >= num_left * alone_s:
                due_s = AHEAD * request.tpot_slo_s * (emitted + self.pace.tokens) - elapsed_s
                allowed_s = min(allowed_s, max(due_s, 0.0))
        return allowed_s

    def _chunks(self, decoding: list[Request], allowed_s: float, now_s: float) -> list[Chunk]:
        """Prefill: promised requests by deadline, then the others as they came, and a bit of who sat out for long."""
        prefilling = [request for request in self.running if not request.is_decoding]
        if not prefilling:
            return []
        overdue = {request for request in prefilling if self._sits.get(request, 0) >= MAX_SITS}
        prefilling.sort(key=lambda request: (request not in overdue, self._rank(request, now_s)))
        promised = [request for request in prefilling if not request.is_best_effort]
        left = num_prefill_tokens(self.prefill, self.pace, len(decoding), promised, self._most_fed, allowed_s, now_s)
        if overdue or promised:
            left = max(left, min(MIN_CHUNK, self._most_fed))
        chunks = list[Chunk]()
        for request in prefilling:
            if left > 0:
                chunks.append(Chunk.of(request, min(left, MIN_CHUNK) if request in overdue else left))
                left -= chunks[-1].num_tokens
        fed = {chunk.request for chunk in chunks}
        for request in prefilling:
            self._sits[request] = 0 if request in fed else self._sits.get(request, 0) + 1
        return chunks

    @property
    def _most_fed(self) -> int:
        """Prefill tokens of a step at most."""
        return max(int(self.limits.prefill_chunk * self._share), 1)

    # ---- memory

    def relieve(self, now_s: float) -> list[Request]:
        """Preempt half of those that nothing was promised to. There is no room for more until a request has finished.

        Returns:
            Those whose K/V is to be dropped; none if only promised requests are left, or a single one.
        """
        spare = self._spare()
        victims = spare[: min((len(spare) + 1) // 2, len(self.running) - 1)]
        for request in victims:
            self.preempt(request, now_s)
        self._kv_limit = self.kv_held
        return victims

    def shrink(self) -> bool:
        """Do half as much per step, for a while.  -> False if it is down to one request already"""
        is_least = self._share * len(self.running) <= 1.0 and self._share * self.limits.prefill_chunk <= 1.0
        self._share /= 2.0
        return not is_least
