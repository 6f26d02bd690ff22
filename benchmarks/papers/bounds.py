"""Bounds on latency, throughput and attainment of a load that no schedule and no policy can beat."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.hardware import Hardware
from hf_slospec.lab.outcomes import METRICS
from hf_slospec.lab.texts import Library
from hf_slospec.lab.workload import Job
from hf_slospec.request.metrics import WINDOW
from hf_slospec.tree.tree import BoolArray, FloatArray, IntArray

BLOCK = 8  # groups of requests whose on-time number is bounded begin at multiples of it
ROUNDING = 1.0 + 1e-9  # factor on allowed times, so that rounding never makes a bound too tight


@dataclass(frozen=True)
class Line:
    """Lower bound of the seconds of a forward of n tokens: ``fixed_s + per_token_s * n``, neither
    negative.
    """

    fixed_s: float
    per_token_s: float


def lines_below(cost: ForwardCost) -> list[Line]:
    """Return the lower convex hull of a forward's cost by tokens as lines, in order of ascending
    slope.

    The first line is horizontal; the last one passes through the origin.
    """
    x = [1.0, *(float(tokens) for tokens in cost.curve.num_tokens if tokens > 1)]
    y = [cost.curve(tokens) for tokens in x]
    hull: list[int] = []
    for index in range(len(x)):
        while len(hull) > 1 and _slope(x, y, hull[-2], hull[-1]) >= _slope(x, y, hull[-1], index):
            hull.pop()
        hull.append(index)
    beyond = cost.curve(x[-1] + 1.0) - y[-1]
    edges = [_slope(x, y, left, right) for left, right in itertools.pairwise(hull)]
    lines = [
        Line(min(s - slope * n for n, s in zip(x, y, strict=True)), slope)
        for slope in sorted({0.0, beyond, *edges})
        if slope <= beyond
    ]
    steepest = min(beyond, *(s / n for n, s in zip(x, y, strict=True)))
    return [*(line for line in lines if line.fixed_s > 0.0), Line(0.0, steepest)]


def _slope(x: Sequence[float], y: Sequence[float], left: int, right: int) -> float:
    return (y[right] - y[left]) / (x[right] - x[left])


class Bounds:
    """Minimum seconds and work of each request of a load on one replica, and the bounds that follow
    from them.

    They hold for every policy and schedule of the simulator's engine, even with knowledge of all
    texts and arrivals, as long as requests draft at most ``max_depth`` levels and ``max_width``
    children per token, at most ``max_batch`` of them run at a time, and each reserves K/V for its
    maximum length. Two relaxations are used:

    - A request is never faster than alone, drafting only tokens that will be accepted, each step at
      the best depth.
    - A line below the cost of the forward divides a step's seconds among its requests, the fixed
      part by their number or by their share of the K/V. The sum of a request's parts, its *work*,
      is as if every forward had the most favourable size; a replica does one second of work per
      second.

    Args:
        library: the texts of the requests, in order.

    Raises:
        InvalidInputError: the numbers of texts and requests differ, a request follows another, or a
            limit is out of its range.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        library: Library,
        hardware: Hardware,
        max_depth: int,
        max_width: int,
        max_batch: int,
    ):
        if not jobs or len(library.lengths) != len(jobs):
            raise InvalidInputError(
                f"every request needs a text, got {len(jobs)} requests, {len(library.lengths)} texts"
            )
        if any(job.after is not None or job.think_tokens for job in jobs):
            raise InvalidInputError(
                "arrivals of requests that follow others depend on the schedule, and stages have no bound here; leave "
                "both out"
            )
        if max_depth < 0 or max_width < 1 or max_batch < 1:
            raise InvalidInputError(
                "max_depth must be at least 0, max_width and max_batch at least 1, "
                f"got {max_depth}, {max_width} and {max_batch}"
            )
        self.jobs = jobs
        self.library = library
        self.hardware = hardware
        self.max_batch = max_batch
        self.arrivals_s = np.array([job.arrival_s for job in jobs])
        self.prompts = np.array([job.input_tokens for job in jobs])
        self.outputs = np.array([job.output_tokens for job in jobs])
        self._hits = np.minimum(_run_lengths(library, max_width), max_depth)
        self._levels = np.arange(max_depth + 1)
        self.prefill_s = self._alone_prefill_s()
        self.decode_s = self.decode_left_s(self.outputs)[self.outputs - 1, np.arange(len(jobs))]

    # ---- alone

    def _alone_prefill_s(self) -> FloatArray:
        """Return the minimum seconds from arrival to the first token, in chunks of the best size.
        -> [n] f64
        """
        target = self.hardware.target
        host_s = self.hardware.host_s
        sizes = np.array([1, *(tokens for tokens in target.curve.num_tokens if tokens > 1)])
        per_token_s = (target.curve(sizes) + host_s) / sizes
        whole_s = target.curve(self.prompts) + host_s  # the prompt as one chunk
        # Between two points of the curve the seconds per token are lowest at one of them, or at the
        # prompt's length.
        best_s = np.minimum.accumulate(per_token_s)[
            np.searchsorted(sizes, self.prompts, side="right") - 1
        ]
        min_s = np.maximum(
            np.minimum(self.prompts * best_s, whole_s), float(target.curve(1) + host_s)
        )
        seconds: FloatArray = min_s + target.per_key_s * self.prompts
        return seconds

    def decode_left_s(self, ends: IntArray) -> FloatArray:
        """Return the minimum seconds to decode the last tokens of each request alone, with outputs
        cut at ``ends``.

        Args:
            ends: [num_requests] int64, output tokens at which a request counts as finished.

        Returns:
            [max(ends) + 1, num_requests] f64; ``[j, r]``: seconds for the last ``j`` of ``ends[r]``
            tokens of ``r``.
        """
        hardware = self.hardware
        levels = self._levels.astype(np.float64)
        draft = hardware.draft.curve(1) * levels + hardware.drafting_request_s * (levels > 0)
        costs = draft + hardware.target.curve(levels + 1) + hardware.host_s
        slopes: FloatArray = hardware.target.per_key_s + hardware.draft.per_key_s * levels
        return self._least_left_s(ends, np.repeat(costs[:, None], len(self.jobs), axis=1), slopes)

    def _least_left_s(self, ends: IntArray, costs: FloatArray, slopes: FloatArray) -> FloatArray:
        """Return the minimum cost of the last tokens, by dynamic programming over the depth of each
        step.

        Args:
            ends: [num_requests] int64, output tokens at which a request counts as finished.
            costs: [max_depth + 1, num_requests] f64, seconds of a step that commits ``depth + 1``
                tokens.
            slopes: [max_depth + 1] f64, seconds of such a step per cached token.
        """
        longest = int(ends.max())
        columns = np.arange(len(ends))
        left = np.zeros((longest + 1, len(ends)))
        for num_left in range(1, longest):
            positions = np.maximum(ends - num_left, 0)  # results of shorter requests are not used
            depths = self._levels[:num_left]
            hits = self._hits[self.library.rows(columns, positions)]
            after = left[num_left - 1 - depths]
            seconds = costs[depths] + slopes[depths][:, None] * (self.prompts + positions) + after
            left[num_left] = np.where(depths[:, None] <= hits, seconds, np.inf).min(axis=0)
        return left

    # ---- work

    def _works(self) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield the work of prefill and of decoding, [num_requests] f64 each, for every way to
        divide the steps.
        """
        hardware = self.hardware
        levels = self._levels.astype(np.float64)
        max_lens = self.prompts + np.array([job.max_output_tokens for job in self.jobs])
        draft = max(
            lines_below(hardware.draft),
            key=lambda line: line.fixed_s + line.per_token_s * self.max_batch,
        )
        for line in lines_below(hardware.target):
            for share in (
                np.full(len(self.jobs), 1.0 / self.max_batch),
                max_lens / hardware.kv_tokens,
            ):
                fixed_s = (line.fixed_s + hardware.host_s) * share
                draft_s = (draft.fixed_s * share + draft.per_token_s) * levels[:, None]
                draft_s += hardware.drafting_request_s * (levels > 0)[:, None]
                costs = fixed_s + draft_s + line.per_token_s * (levels + 1)[:, None]
                slopes: FloatArray = hardware.target.per_key_s + hardware.draft.per_key_s * levels
                decode = self._least_left_s(self.outputs, costs, slopes)[
                    self.outputs - 1, np.arange(len(self.jobs))
                ]
                yield (
                    fixed_s + (line.per_token_s + hardware.target.per_key_s) * self.prompts,
                    decode,
                )

    # ---- bounds

    def latency_s(self) -> float:
        """Return a lower bound of the mean seconds from arrival to the last token.

        It is the larger of the mean of requests served alone, and the mean of shortest remaining
        work first, the optimal rule for one machine.
        """
        alone_s = float((self.prefill_s + self.decode_s).mean())
        return max(
            alone_s,
            *(
                _shortest_first_s(self.arrivals_s, prefill + decode)
                for prefill, decode in self._works()
            ),
        )

    def seconds(self) -> float:
        """Return a lower bound of the seconds from the first arrival to the last token of all."""
        first_s = float(self.arrivals_s.min())
        end_s = float((self.arrivals_s + self.prefill_s + self.decode_s).max())
        order = np.argsort(self.arrivals_s, kind="stable")
        for prefill, decode in self._works():
            after = np.cumsum((prefill + decode)[order][::-1])[
                ::-1
            ]  # work of a request and all that arrive later
            end_s = max(end_s, float((self.arrivals_s[order] + after).max()))
        return end_s - first_s

    def throughput(self) -> float:
        """Return an upper bound of the tokens per second of the whole load."""
        return float(self.outputs.sum()) / self.seconds()

    def goodput(self, metric: str) -> float:
        """Return an upper bound of the tokens per second of requests that attain their SLOs, by a
        name in METRICS.
        """
        return float(self.outputs[self.attainable(metric)].sum()) / self.seconds()

    def attainment(self, metric: str) -> float | None:
        """Return an upper bound of the share of requests that attain their SLOs; None if none has
        an SLO.

        A request attains its SLOs only if it would alone. With TTFT SLOs, the requests are divided
        into consecutive groups; of each, at most as many finish in time as Moore and Hodgson's rule
        allows if all arrived with the first one. The division with the lowest sum is used. Without
        TTFT SLOs the bound is exact, apart from beams that lose a path and prompts that the draft
        prefills: waiting misses no SLO, so serving one request at a time reaches it."""
        judged = self._judged(metric)
        if not judged.any():
            return None
        can = self.attainable(metric) & judged
        best = int(can.sum())
        if metric != "adaserve" and (can & np.isfinite(self._ttft_due_s())).any():
            first_due_s = self._ttft_due_s()[can]
            (_, allowed_s) = self._allowed(metric)
            last_due_s = first_due_s + allowed_s[can]
            arrivals_s = self.arrivals_s[can]
            for prefill, decode in self._works():
                for work, due_s in ((prefill, first_due_s), (prefill + decode, last_due_s)):
                    best = min(best, _most_in_time(arrivals_s, work[can], due_s))
        return best / int(judged.sum())

    def attainable(self, metric: str) -> BoolArray:
        """Return a mask of the requests that attain their SLOs when served alone.  ->
        [num_requests] bool
        """
        ends, allowed_s = self._allowed(metric)
        min_s = self.decode_left_s(ends)[ends - 1, np.arange(len(ends))]
        can: BoolArray = self._judged(metric) & (min_s <= allowed_s)
        if metric != "adaserve":
            can &= self.arrivals_s + self.prefill_s <= self._ttft_due_s()
        return can

    def _judged(self, metric: str) -> BoolArray:
        if metric not in METRICS:
            raise InvalidInputError(f"unknown metric {metric!r}; known are: {', '.join(METRICS)}")
        counts_ttft = metric != "adaserve"
        return np.array([
            job.tpot_slo_s is not None or (counts_ttft and job.ttft_slo_s is not None) for job in self.jobs
        ])  # fmt: skip

    def _ttft_due_s(self) -> FloatArray:
        ttft_s = np.array(
            [np.inf if job.ttft_slo_s is None else job.ttft_slo_s for job in self.jobs]
        )
        due_s: FloatArray = self.arrivals_s + ttft_s * ROUNDING
        return due_s

    def _allowed(self, metric: str) -> tuple[IntArray, FloatArray]:
        """Return the tokens that the metric counts, and the seconds after the first one within
        which they are due.
        """
        slos_s = np.array(
            [np.inf if job.tpot_slo_s is None else job.tpot_slo_s for job in self.jobs]
        )
        ends = self.outputs
        if metric == "slos-serve":  # whole windows, each of which must be fast enough
            ends = np.where(ends > WINDOW, (ends - 1) // WINDOW * WINDOW + 1, ends)
        gaps = ends if metric == "adaserve" else np.maximum(ends - 1, 0)
        allowed_s = np.where(gaps > 0, slos_s * np.maximum(gaps, 1), np.inf)
        return ends, allowed_s * ROUNDING


def _run_lengths(library: Library, max_width: int) -> IntArray:
    """Return for every position how many tokens from it on are among the draft's first
    ``max_width``.  -> [num_rows]
    """
    size = len(library.ranks)
    ends = np.repeat(library.starts + library.lengths, library.lengths)
    is_missed = library.ranks >= min(max_width, library.num_children)
    next_missed = np.minimum.accumulate(np.where(is_missed, np.arange(size), size)[::-1])[::-1]
    runs: IntArray = np.minimum(next_missed, ends) - np.arange(size)
    return runs


def _shortest_first_s(arrivals_s: FloatArray, works: FloatArray) -> float:
    """Return the mean flow time of preemptive shortest remaining work first on one machine."""
    order = np.argsort(arrivals_s, kind="stable").tolist()
    waiting: list[float] = []  # remaining processing times
    now_s = 0.0
    finished_s = 0.0
    num_arrived = 0
    while num_arrived < len(order) or waiting:
        if not waiting:
            now_s = max(now_s, float(arrivals_s[order[num_arrived]]))
        while num_arrived < len(order) and arrivals_s[order[num_arrived]] <= now_s:
            heapq.heappush(waiting, float(works[order[num_arrived]]))
            num_arrived += 1
        until_s = float(arrivals_s[order[num_arrived]]) if num_arrived < len(order) else np.inf
        work = heapq.heappop(waiting)
        if now_s + work <= until_s:
            now_s += work
            finished_s += now_s
        else:
            heapq.heappush(waiting, work - (until_s - now_s))
            now_s = until_s
    return (finished_s - float(arrivals_s.sum())) / len(order)


def _most_in_time(
    arrivals_s: FloatArray, works: FloatArray, due_s: FloatArray, block: int = BLOCK
) -> int:
    """Return an upper bound of the requests that one machine can finish in time."""
    order = np.argsort(arrivals_s, kind="stable")
    arrivals_s, works, due_s = arrivals_s[order], works[order], due_s[order]
    cuts = [*range(0, len(order), block), len(order)]
    best = [0] * len(cuts)
    for end in range(1, len(cuts)):
        sizes = [2**power for power in range(end.bit_length()) if 2**power <= end]
        best[end] = min(
            best[end - size] + _moore_hodgson(arrivals_s, works, due_s, cuts[end - size], cuts[end])
            for size in sizes
        )
    return best[-1]


def _moore_hodgson(
    arrivals_s: FloatArray, works: FloatArray, due_s: FloatArray, begin: int, end: int
) -> int:
    """Return the maximum number of requests of a group that finish in time if all arrive with the
    first one.
    """
    now_s, taken = (
        float(arrivals_s[begin]),
        list[float](),
    )  # negative processing times, a heap with the longest first
    for index in (begin + np.argsort(due_s[begin:end], kind="stable")).tolist():
        if not np.isfinite(due_s[index]):
            return len(taken) + int(np.isinf(due_s[begin:end]).sum())
        now_s += float(works[index])
        heapq.heappush(taken, -float(works[index]))
        if now_s > due_s[index]:
            now_s += heapq.heappop(taken)
    return len(taken)
