"""Choice of the running requests that a step decodes, and of the prompts prefilled beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.first_tokens import IN_TIME
from hf_slospec.engine.interfaces import Chunk, Schedule
from hf_slospec.engine.latency_curves import Seconds
from hf_slospec.request.metrics import WINDOW
from hf_slospec.request.request import Request
from hf_slospec.scheduler import AdmissionName, PrefillName
from hf_slospec.scheduler.guarantees import (
    can_fall_back,
    first_token_slo_s,
    lost_s,
    tightest_tpot_slo_s,
)
from hf_slospec.scheduler.prefill import (
    fast_enough,
    prefill_budget,
    required_rate,
    spare_budget,
    waiting_for_equal,
    within,
)
from hf_slospec.scheduler.window_guarantees import WindowGuarantees
from hf_slospec.tree.tree import IntArray

# Minimum prefill tokens of a step for guaranteed requests, even if decoding requests become late
MIN_CHUNK = 8
# Minimum prefill tokens of a step for a request that was skipped MAX_SKIPPED times
OVERDUE_CHUNK = 16
OVERDUE_SHARE = 0.125  # if windows are guaranteed, at most this share of the step's prefill
AHEAD = 0.95  # guaranteed requests are scheduled to keep this share of their TPOT SLO
SAVES = 1.05  # requests are skipped only if they make a step more than this many times as long
WAIT = 8.0  # steps that a guaranteed request must be ahead of its SLO to be skipped in one
# Weight of the mean over all requests in a request's tokens per step, in steps of the request
TYPICAL = 8.0
MAX_SKIPPED = 32  # maximum number of consecutive steps in which a running request is skipped

# Request and time -> key by which requests are served
Rank = Callable[[Request, float], tuple[float, ...]]


class BatchFormation:
    """Forms the batch of each step so that guaranteed requests keep their pace.

    Requests that can wait are skipped in steps that would make other requests late, or delay first
    tokens, but not in too many in a row. The rest of a step's time goes to prefill.
    """

    def __init__(
        self,
        prefill_chunk: int,
        costs: StepCosts,
        admission: AdmissionName,
        prefill: PrefillName,
        windows: WindowGuarantees,
        shares_prompts: bool = False,
    ):
        """Begin without any skipped request; see :class:`ContinuousScheduler` for the arguments."""
        self._prefill_chunk = prefill_chunk
        self._shares_prompts = shares_prompts
        self._costs = costs
        self._windows = windows
        self._admission = admission
        self.prefill = prefill
        # Consecutive steps in which a running request was skipped
        self._num_skipped = Counter[Request]()
        self._share = 1.0  # share of a full batch that memory allows
        # Seconds of a step without drafts to which the policy can fall back; inf: it cannot
        self._plain_s = math.inf
        self._lost = set[Request]()  # decoding requests that can no longer keep their SLO or window

    def form(
        self, running: Sequence[Request], rank: Rank, has_waiting: bool, now_s: float
    ) -> Schedule:
        """Return the decoding requests and the prefill of the next step.

        Args:
            running: requests with slots.
            rank: order in which prompts are prefilled.
            has_waiting: requests wait for slots.
            now_s: time at which the step begins.
        """
        decoding = [request for request in running if request.is_decoding]
        self._lost = self._lost_of(decoding, now_s)
        self._plain_s = self._plain_step_s(decoding)
        allowed_s = self._allowed_s(decoding, now_s)
        taking_part = self._taking_part(running, decoding, allowed_s, now_s)
        chunks = self._chunks(running, len(taking_part), rank, allowed_s, now_s)
        prefills_only = bool(chunks) and self.prefill == "first"
        if not prefills_only:
            taking_part = self._leaving_time(taking_part, chunks, has_waiting, allowed_s, now_s)
        self._count_skipped(decoding, taking_part)
        return Schedule([] if prefills_only else taking_part, chunks)

    def forget(self, request: Request) -> None:
        """Drop the number of skipped steps of a request that no longer runs."""
        self._num_skipped.pop(request, None)

    def recover(self) -> None:
        """Let batches grow again after a step that fitted into memory."""
        self._share = min(1.0, self._share * 1.05)

    def shrink(self, num_running: int) -> bool:
        """Halve the size of the next batches; return False if it is already down to one request or
        token per step.
        """
        is_minimal = self._share * num_running <= 1.0 and self._share * self._prefill_chunk <= 1.0
        if not is_minimal:  # a smaller share would only take more steps to recover
            self._share /= 2.0
        return not is_minimal

    def _count_skipped(self, requests: Sequence[Request], taking_part: Sequence[Request]) -> None:
        not_skipped = set(taking_part)
        for request in requests:
            num_skipped = self._num_skipped[request] + 1
            self._num_skipped[request] = 0 if request in not_skipped else num_skipped

    @property
    def _max_chunk(self) -> int:
        return max(int(self._prefill_chunk * self._share), 1)

    def _plain_step_s(self, decoding: Sequence[Request]) -> float:
        """Return the seconds of a step without drafts of the guaranteed requests, with as much
        prefill as arrives during it.

        It is inf if the policy cannot fall back to steps without drafts.
        """
        guaranteed = self._keeping(decoding)
        tightest_s = min((tightest_tpot_slo_s(request) for request in guaranteed), default=math.inf)
        if not (guaranteed and can_fall_back(tightest_s, self._costs, self._windows)):
            return math.inf
        arriving = self._costs.recent.prefill_rate * float(self._step_s(guaranteed, 0))
        return float(self._step_s(guaranteed, math.ceil(arriving)))

    def _steady_s(self, decoding: Sequence[Request]) -> float:
        """Return the maximum seconds of a step for which one token per step keeps all guaranteed
        requests on pace.
        """
        paces_s = (request.pace_s or math.inf for request in self._keeping(decoding))
        return AHEAD * min(paces_s, default=math.inf)

    def _keeping(self, decoding: Sequence[Request]) -> list[Request]:
        """Return the guaranteed requests that can still keep their TPOT SLO."""
        return [r for r in decoding if r.is_guaranteed and not self._is_spare(r)]

    def _plain_chunk(
        self, running: Sequence[Request], num_decoding: int, allowed_s: float, now_s: float
    ) -> int:
        """Return the prefill tokens of a step where the policy can fall back to plain decoding.

        Guaranteed prompts are prefilled as fast as steps without drafts allow while one token each
        keeps requests on pace. If prompts are due, they are prefilled faster, but never so fast
        that a guaranteed window is missed. Other prompts get what a step with drafts leaves.
        """
        costs = self._costs
        max_tokens = self._max_chunk
        if not num_decoding:
            return max_tokens
        _, spare = spare_budget(costs, num_decoding, max_tokens, allowed_s)
        guaranteed = [
            request for request in running if not (request.is_decoding or request.is_best_effort)
        ]
        if not guaranteed:
            return spare
        num_tokens = num_decoding + np.arange(1, max_tokens + 1)
        seconds = costs.verify_s(num_tokens, num_decoding, num_decoding * costs.recent.keys)
        plain_s = np.maximum.accumulate(seconds)
        steady_s = self._steady_s([request for request in running if request.is_decoding])
        due = [request for request in guaranteed if first_token_slo_s(request) < math.inf]
        needed = fast_enough(plain_s, required_rate(due, costs, now_s))
        budget = max(
            within(plain_s, min(allowed_s, steady_s)), min(needed, within(plain_s, allowed_s))
        )
        return max(min(budget, sum(request.num_uncached for request in guaranteed)), spare)

    def _taking_part(
        self, running: Sequence[Request], decoding: list[Request], allowed_s: float, now_s: float
    ) -> list[Request]:
        """Return the requests that decode now; requests that can wait are skipped if they would
        make other requests late.
        """
        if self._share < 1.0:  # after running out of memory: the requests skipped longest first
            in_order = sorted(decoding, key=lambda request: -self._num_skipped[request])
            chosen = set(in_order[: max(math.ceil(self._share * len(decoding)), 1)])
        # Best-effort requests take the time that a step without drafts leaves.
        elif self._plain_s < math.inf:
            must = [r for r in decoding if not self._is_spare(r) or self._is_overdue(r)]
            spare = sorted(
                set(decoding) - set(must), key=lambda r: (-self._num_skipped[r], r.index)
            )
            is_prefilling = any(not (r.is_decoding or r.is_best_effort) for r in running)
            chunk = self._plain_chunk(running, len(must), allowed_s, now_s) if is_prefilling else 0
            numbers = len(must) + np.arange(1, len(spare) + 1)
            num_keys = np.asarray(numbers * self._costs.recent.keys)
            times_s = self._costs.verify_s(numbers + chunk, numbers, num_keys)
            limit_s = min(allowed_s, self._steady_s(decoding)) if is_prefilling else allowed_s
            chosen = {*must, *spare[: int(np.count_nonzero(times_s <= limit_s))]}
        elif decoding and (all_s := self._costs.step_s(len(decoding))) > allowed_s:
            spare = [r for r in decoding if self._is_ahead(r, now_s, all_s)]
            # stable: otherwise in order of arrival
            spare.sort(key=lambda request: -self._num_skipped[request])
            num_must = len(decoding) - len(spare)
            least_s = self._costs.step_s(max(num_must, 1))
            times_s = self._costs.step_s(num_must + np.arange(1, len(spare) + 1))
            num_spare = int(np.count_nonzero(times_s <= max(allowed_s, SAVES * least_s)))
            chosen = set(decoding) - {r for r in spare[num_spare:] if not self._is_overdue(r)}
        else:
            chosen = set(decoding)
        return [request for request in decoding if request in chosen]

    def _allowed_s(self, decoding: list[Request], now_s: float) -> float:
        """Return the seconds that the step may take so that no guaranteed request falls behind; 0
        if one already has.

        Requests that miss their SLO anyway do not count.
        """
        keeping = [r for r in decoding if r.is_guaranteed and r not in self._lost]
        if self._admission in ("fcfs", "priority") or not keeping:
            return math.inf
        step_s = self._costs.step_s(len(decoding))
        return max(min(self._due_s(each, now_s, step_s) for each in keeping), 0.0)

    def _lost_of(self, decoding: Sequence[Request], now_s: float) -> set[Request]:
        """Return the requests that would miss their TPOT SLO, or an open window that is guaranteed,
        even if they decoded alone from now on.
        """
        if not any(request.pace_s for request in decoding):
            return set()
        step_s = self._costs.step_s(1)
        token_s = step_s / self._costs.recent.lasting_tokens

        def is_lost(request: Request) -> bool:
            elapsed_s, emitted, num_left = request.paced(now_s)
            # The first token of a stage takes a whole step.
            least_s = num_left * token_s if request.stage_due_s == math.inf else step_s
            return bool((request.pace_s or math.inf) * (emitted + num_left) - elapsed_s < least_s)

        return set(filter(is_lost, decoding))

    def _due_s(self, request: Request, now_s: float, step_s: float) -> float:
        """Return the seconds within which a step with the request must end to keep its pace.

        A guaranteed window of ten tokens must also leave time for its tokens after this step, at
        the planned share of the SLO.

        Args:
            step_s: seconds of a step of all decoding requests.
        """
        if request.pace_s is None:
            return math.inf
        # However many tokens the step commits, the first one of a stage comes with its end.
        tokens = self._costs.recent.tokens if request.stage_due_s == math.inf else 1.0
        if not request.has_open_guarantee:
            elapsed_s, emitted = request.decoded(now_s)
            return AHEAD * request.pace_s * (emitted + tokens) - elapsed_s
        share = self._windows.share(tightest_tpot_slo_s(request))
        stats = request.stats
        tokens_per_step = (request.num_emitted - stats.num_resumed + TYPICAL * tokens) / (
            stats.num_steps + TYPICAL
        )
        token_s = min(step_s / min(tokens_per_step, tokens) / share, request.pace_s)
        # plain steps suffice, however few drafts are accepted
        if self._plain_s <= token_s:
            token_s = self._plain_s
            tokens = 1.0
        elapsed_s, emitted = request.tightest_window(now_s, token_s)
        return (
            AHEAD * WINDOW * request.pace_s
            - elapsed_s
            - token_s * max(WINDOW - emitted - tokens, 0.0)
        )

    def _chunks(
        self,
        running: Sequence[Request],
        num_decoding: int,
        rank: Rank,
        allowed_s: float,
        now_s: float,
    ) -> list[Chunk]:
        """Return the chunks to prefill: of overdue requests, then of guaranteed ones by deadline,
        then of best-effort ones by arrival.
        """
        prefilling = [request for request in running if not request.is_decoding]
        if not prefilling:
            return []
        overdue = set(filter(self._is_overdue, prefilling))
        prefilling.sort(key=lambda request: (request not in overdue, rank(request, now_s)))
        guaranteed = [request for request in prefilling if not request.is_best_effort]
        max_tokens = self._max_chunk
        if self._plain_s < math.inf and self.prefill == "beside":
            left = self._plain_chunk(running, num_decoding, allowed_s, now_s)
        else:
            # Prompts whose first token has no deadline must make no guaranteed window late.
            due = [
                r
                for r in guaranteed
                if self._windows.probability is None or first_token_slo_s(r) < math.inf
            ]
            left = prefill_budget(
                self.prefill, self._costs, num_decoding, due, max_tokens, allowed_s, now_s
            )
        if overdue or (guaranteed and self._plain_s == math.inf):
            left = max(left, min(OVERDUE_CHUNK if overdue else MIN_CHUNK, max_tokens))
        max_chunk = OVERDUE_CHUNK
        # admission counts on nearly all of the prefill, so overdue requests get little
        if self._plain_s < math.inf and overdue and guaranteed:
            overdue = {
                max(overdue, key=lambda request: (self._num_skipped[request], -request.index))
            }
            prefilling.sort(key=lambda request: (request not in overdue, rank(request, now_s)))
            max_chunk = min(max_chunk, math.ceil(OVERDUE_SHARE * left))
        chunks = list[Chunk]()
        waiting = waiting_for_equal(prefilling) if self._shares_prompts else {}
        shared = set(waiting.values())
        for request in prefilling:
            if left > 0 and request not in waiting:
                limit = min(left, max_chunk) if request in overdue else left
                if request in shared:  # the last token is prefilled with those that wait
                    limit = min(limit, request.num_uncached - 1)
                chunks.append(Chunk.of(request, limit))
                left -= chunks[-1].num_tokens
        self._count_skipped(prefilling, [chunk.request for chunk in chunks])
        return chunks

    def _leaving_time(
        self,
        decoding: list[Request],
        chunks: Sequence[Chunk],
        has_waiting: bool,
        allowed_s: float,
        now_s: float,
    ) -> list[Request]:
        """Return the requests that decode beside the chunks, and tell the policy which SLOs it must
        not delay.

        Requests that can wait are skipped if only that keeps a first token of the step in time."""
        first_tokens = self._costs.first_tokens
        first = [
            chunk.request for chunk in chunks if chunk.is_last and not chunk.request.num_emitted
        ]
        dues_s = [lost_s(request) - now_s for request in first]
        dues_s += [request.stage_due_s - now_s for request in decoding]
        windows_s = allowed_s if self._plain_s < math.inf else math.inf
        if not first_tokens.is_expected and all(
            due_s == math.inf for due_s in (*dues_s, windows_s)
        ):
            first_tokens.begin(math.inf, None)
            return decoding
        plain_s = float(self._step_s(decoding, 0))
        must = [request for request in decoding if not self._can_wait(request, now_s, plain_s)]
        num_prefill_tokens = sum(chunk.num_tokens for chunk in chunks)
        step_s, least_s = (
            float(self._step_s(requests, num_prefill_tokens)) for requests in (decoding, must)
        )
        taking_part = decoding
        if any(least_s <= due_s < step_s for due_s in dues_s):
            taking_part = must
            step_s = least_s
        due_s = min(
            (max(IN_TIME * due_s, step_s) for due_s in dues_s if due_s >= step_s), default=math.inf
        )
        if windows_s < math.inf:
            due_s = min(due_s, max(windows_s, step_s))
        # Requests that arrive now would wait for slots anyway, or drafts must keep others in time.
        is_lost = has_waiting or any(
            self._needs_drafts(request, now_s, plain_s) for request in decoding
        )
        first_tokens.begin(due_s, None if is_lost else partial(self._step_s, must))
        return taking_part

    def _step_s(self, decoding: Sequence[Request], num_prefill_tokens: IntArray | int) -> Seconds:
        """Return the seconds of steps without drafts, by their numbers of prefill tokens."""
        number = len(decoding)
        num_keys = sum(len(request.tokens) for request in decoding)
        return self._costs.verify_s(number + num_prefill_tokens, max(number, 1), num_keys)

    def _needs_drafts(self, request: Request, now_s: float, plain_s: float) -> bool:
        """Return whether a request can keep its pace only if steps commit several of its tokens;
        False if it cannot at all.
        """
        elapsed_s, emitted, num_left = request.paced(now_s)
        left_s = AHEAD * (request.pace_s or math.inf) * (emitted + num_left) - elapsed_s
        return request not in self._lost and plain_s * num_left > left_s

    def _can_wait(self, request: Request, now_s: float, step_s: float) -> bool:
        """Return whether a decoding request may be skipped for the first token of another."""
        if self._admission in ("fcfs", "priority") or self._is_overdue(request):
            return False
        return request.stage_due_s == math.inf and self._is_ahead(request, now_s, step_s)

    def _is_ahead(self, request: Request, now_s: float, step_s: float) -> bool:
        """Return whether a request keeps its guarantee, if it can, without the next few steps."""
        return self._is_spare(request) or self._due_s(request, now_s, step_s) > WAIT * step_s

    def _is_spare(self, request: Request) -> bool:
        """Return whether a request has no guarantee, or cannot keep it; windows that are guaranteed
        count until one is missed.
        """
        return request.is_best_effort or (request in self._lost and not request.has_open_guarantee)

    def _is_overdue(self, request: Request) -> bool:
        return self._num_skipped[request] >= MAX_SKIPPED
