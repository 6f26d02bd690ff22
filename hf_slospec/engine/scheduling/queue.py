"""Queues of waiting requests, in which a turn of the scheduler looks at the first ones only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from hf_slospec.engine.request import Request

SLACK = 16  # removed entries that a heap may hold beside as many again as there are requests

Key = tuple[float, ...]
Rank = Callable[[Request, float], Key]  # place in the order at a time
NextChange = Callable[[Request, float], float]  # when the rank changes, after a time; inf: never


class RequestHeap:
    """Requests by their keys, equal ones in the order in which they came.

    Every operation takes logarithmic time, on average over many.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []  # key, number of the entry, request
        self._entries: dict[Request, tuple[Key, int, Request]] = {}  # all others in the heap were removed
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def put(self, request: Request, key: Key) -> None:
        """Add a request, or give it another key."""
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
        """Return the lowest key and its request; None without any."""
        while self._heap:
            key, _, request = entry = self._heap[0]
            if self._entries.get(request) is entry:
                return key, request
            heapq.heappop(self._heap)
        return None


class WaitingQueue:
    """Waiting requests by their rank, which changes at known times; iterating is in the order in which they came."""

    def __init__(self, rank: Rank, next_change: NextChange):
        self._rank, self._next_change = rank, next_change
        self._requests: dict[Request, None] = {}  # in the order in which they came
        self._ranked, self._changes = RequestHeap(), RequestHeap()  # by rank, and by the time when it changes

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def put(self, request: Request) -> None:
        """Add a request, or rank it anew, as what its rank depends on has changed."""
        self._requests[request] = None
        self._changes.put(request, (-math.inf,))

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        self._requests.pop(request, None)
        self._ranked.remove(request)
        self._changes.remove(request)

    def first(self, now_s: float) -> tuple[Key, Request] | None:
        """Return the lowest rank at a time, no earlier than that of the call before, and its request, or None."""
        while (change := self._changes.first()) is not None and change[0][0] <= now_s:
            request = change[1]
            self._ranked.put(request, self._rank(request, now_s))
            if (next_s := self._next_change(request, now_s)) < math.inf:
                self._changes.put(request, (next_s,))
            else:
                self._changes.remove(request)
        return self._ranked.first()


class Undecided:
    """Requests whose SLOs are not guaranteed yet, by deadline, those of every TPOT SLO apart."""

    def __init__(self, tpot_slo_s: Callable[[Request], float], deadline_s: Callable[[Request], float]):
        """``tpot_slo_s`` returns an SLO of which there are few, as all of them are looked at."""
        self._tpot_slo_s, self._deadline_s = tpot_slo_s, deadline_s
        self._by_slo: dict[float, RequestHeap] = {}
        self._keys: dict[Request, Key] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def add(self, request: Request) -> None:
        """Add a request."""
        self._keys[request] = self._deadline_s(request), next(self._numbers)
        self._put(request)

    def _put(self, request: Request) -> None:
        self._by_slo.setdefault(self._tpot_slo_s(request), RequestHeap()).put(request, self._keys[request])

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        if self._keys.pop(request, None) is not None:
            tpot_slo_s = self._tpot_slo_s(request)
            self._by_slo[tpot_slo_s].remove(request)
            if not len(self._by_slo[tpot_slo_s]):
                del self._by_slo[tpot_slo_s]

    def earliest(
        self, number: int, is_possible: Callable[[float], bool], is_lost: Callable[[Request], bool]
    ) -> list[Request]:
        """Return the requests with the earliest deadlines, after removing those before them that are lost.

        Args:
            number: of requests, at most.
            is_possible: whether requests of this TPOT SLO count.
            is_lost: whether a request's SLOs cannot be met any longer.
        """
        heaps = [heap for tpot_slo_s, heap in self._by_slo.items() if is_possible(tpot_slo_s)]
        taken = list[Request]()
        while len(taken) < number and (firsts := [first for heap in heaps if (first := heap.first()) is not None]):
            _, request = min(firsts, key=lambda first: first[0])
            if is_lost(request):
                self.remove(request)
            else:
                self._by_slo[self._tpot_slo_s(request)].remove(request)
                taken.append(request)
        for request in taken:
            self._put(request)
        return taken
