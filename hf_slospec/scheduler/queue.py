"""Queues of waiting requests; a scheduling decision reads only the requests at their front."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hf_slospec.request.request import Request
from hf_slospec.scheduler.guarantees import (
    planned_tpot_slo_s,
    prefill_deadline_s,
    tightest_tpot_slo_s,
)

SLACK = 16  # removed entries that a heap may hold until it is rebuilt, besides one per request

Key = tuple[float, ...]
# request, time -> its rank, a sort key; the request with the lowest one is first
Rank = Callable[[Request, float], Key]
# request, time -> later time at which the rank changes next; inf: never
NextChange = Callable[[Request, float], float]


class RequestHeap:
    """Priority queue of requests: the lowest key comes first, and of equal keys the first inserted.
    Operations take logarithmic time, amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []  # key, number of insertion, request
        # the valid entry of each request; all other entries of ``_heap`` were removed or replaced
        self._entries: dict[Request, tuple[Key, int, Request]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def put(self, request: Request, key: Key) -> None:
        """Add a request, or change its key."""
        self._entries[request] = entry = key, next(self._numbers), request
        heapq.heappush(self._heap, entry)
        self._prune()

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        if self._entries.pop(request, None) is not None:
            self._prune()

    def _prune(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self) -> tuple[Key, Request] | None:
        """Return the lowest key and its request; None if the heap is empty."""
        while self._heap:
            key, _, request = entry = self._heap[0]
            if self._entries.get(request) is entry:
                return key, request
            heapq.heappop(self._heap)
        return None


class _Size(NamedTuple):
    """Contribution of one waiting request to the totals of its queue."""

    num_tokens: int
    max_len: int
    guaranteed_slo_s: float | None  # tightest TPOT SLO of a guaranteed request, else None


class WaitingQueue:
    """Queue of waiting requests, lowest rank first. Ranks change at times that are known in
    advance. Iteration is in order of insertion.

    Totals are kept up to date, so that reports of the load need not read every request.
    """

    def __init__(self, rank: Rank, next_change: NextChange):
        self._rank = rank
        self._next_change = next_change
        self._sizes: dict[Request, _Size] = {}  # in order of insertion
        self._ranked = RequestHeap()  # requests by rank
        self._changes = RequestHeap()  # requests by the time at which their rank changes next
        self.num_tokens = 0  # tokens of all waiting requests, none of which is cached
        self.max_len = 0  # sum of the requests' maximum lengths in tokens
        # number of guaranteed requests by their tightest TPOT SLO in seconds
        self.guaranteed: Counter[float] = Counter()

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sizes)

    def __contains__(self, request: Request) -> bool:
        return request in self._sizes

    def put(self, request: Request) -> None:
        """Add a request, or update its rank after a change to it."""
        if request in self._sizes:
            self._count(self._sizes[request], -1)
        slo_s = tightest_tpot_slo_s(request) if request.is_guaranteed else None
        size = self._sizes[request] = _Size(len(request.tokens), request.params.max_len, slo_s)
        self._count(size, 1)
        self._changes.put(request, (-math.inf,))

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        if (size := self._sizes.pop(request, None)) is not None:
            self._count(size, -1)
        self._ranked.remove(request)
        self._changes.remove(request)

    def _count(self, size: _Size, sign: int) -> None:
        self.num_tokens += sign * size.num_tokens
        self.max_len += sign * size.max_len
        if (slo_s := size.guaranteed_slo_s) is not None:
            self.guaranteed[slo_s] += sign
            if not self.guaranteed[slo_s]:
                del self.guaranteed[slo_s]

    def first(self, now_s: float) -> tuple[Key, Request] | None:
        """Return the lowest rank at ``now_s`` and its request; None if the queue is empty.
        ``now_s`` must not decrease between calls.
        """
        while (change := self._changes.first()) is not None and change[0][0] <= now_s:
            request = change[1]
            self._ranked.put(request, self._rank(request, now_s))
            if (next_s := self._next_change(request, now_s)) < math.inf:
                self._changes.put(request, (next_s,))
            else:
                self._changes.remove(request)
        return self._ranked.first()


class Undecided:
    """Requests whose SLOs are not guaranteed yet: one heap for each TPOT SLO, ordered by prefill
    deadline.
    """

    def __init__(self) -> None:
        self._by_slo: dict[float, RequestHeap] = {}
        self._keys: dict[Request, Key] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def add(self, request: Request) -> None:
        self._keys[request] = prefill_deadline_s(request), next(self._numbers)
        self._put(request)

    def _put(self, request: Request) -> None:
        heap = self._by_slo.setdefault(planned_tpot_slo_s(request), RequestHeap())
        heap.put(request, self._keys[request])

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        if self._keys.pop(request, None) is not None:
            tpot_slo_s = planned_tpot_slo_s(request)
            self._by_slo[tpot_slo_s].remove(request)
            if not len(self._by_slo[tpot_slo_s]):
                del self._by_slo[tpot_slo_s]

    def earliest(
        self, number: int, is_possible: Callable[[float], bool], is_lost: Callable[[Request], bool]
    ) -> list[Request]:
        """Return the requests with the earliest deadlines, and remove lost requests that come
        before them.

        Args:
            number: maximum number of requests to return.
            is_possible: returns whether a planned TPOT SLO can be met at all; requests whose SLO
                cannot are skipped.
            is_lost: returns whether a request's TTFT SLO cannot be met any more.
        """
        heaps = [heap for tpot_slo_s, heap in self._by_slo.items() if is_possible(tpot_slo_s)]
        taken = list[Request]()
        while len(taken) < number and (
            firsts := [first for heap in heaps if (first := heap.first()) is not None]
        ):
            _, request = min(firsts, key=lambda first: first[0])
            if is_lost(request):
                self.remove(request)
            else:
                self._by_slo[planned_tpot_slo_s(request)].remove(request)
                taken.append(request)
        for request in taken:
            self._put(request)
        return taken
