"""A request that is being decoded: its tokens, and how it fares against its SLOs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from hf_slospec.engine.acceptance import Drawing
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.errors import InvalidInputError
from hf_slospec.request.metrics import WINDOW, RequestMetrics, worst_tpot_s
from hf_slospec.request.params import Noise, RequestParams
from hf_slospec.request.slo import LEAST_SLO_S, Stage
from hf_slospec.request.state import FinishReason, Progress, RequestKV, RequestState, RequestStats

NewNoise = Callable[["Request"], Noise | None]  # None: the noise cannot be known in advance


class Request:
    """A sequence being decoded: what was asked for (``params``), tokens, K/V (``kv``), times and
    counts (``stats``).

    ``tokens`` holds the prompt and every committed token. Only ``emit``, ``end`` and the loop of
    stock ``generate`` write it and ``state``. The scheduler writes ``is_guaranteed`` and
    ``window_guarantee``; a drafter that cannot use ``noise`` sets it to None."""

    state = RequestState.UNFINISHED
    error: BaseException | None = None  # of the request's processors or criteria, which ended it
    is_guaranteed: bool | None = None  # the batcher guarantees the SLOs; None: not decided
    window_guarantee: float | None = None  # probability that all windows of ten tokens keep TPOT
    # Engine's time at which the first token of a later stage is due; inf once it has come, and
    # without a TTFT SLO.
    stage_due_s = math.inf

    def __init__(
        self,
        index: int,
        params: RequestParams,
        arrived_s: float = 0.0,
        progress: Progress | None = None,
        new_noise: NewNoise | None = None,
    ):
        """Begin a request, or continue one of another engine.

        After ``progress``, the first stage counts time and tokens from the first token on, a later
        stage from ``arrived_s`` on.

        Args:
            index: row of the batch, or number since the batcher's start; breaks ties.
            arrived_s: seconds when this engine got the request.
            progress: output of another engine.
            new_noise: returns the noise of a sampled request, if it can be known in advance.

        Raises:
            InvalidInputError: the output of the other engine is finished.
        """
        self.index = index
        self.params = params
        self.tokens = list(params.prompt)
        self.prompt_len = len(params.prompt)  # tokens of the prompt
        self.kv = RequestKV()
        self.stats = RequestStats(arrived_s)
        self._num_before_stage = 0
        self._ends: list[int] = []  # new tokens up to each end of a stage in the current step
        if progress is not None:
            self._resume(progress, arrived_s)
        self.noise = None if new_noise is None else new_noise(self)

    @property
    def is_finished(self) -> bool:
        """Return whether the state is final."""
        return self.state is not RequestState.UNFINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Public name of the final state; None before the end."""
        return cast(FinishReason, self.state.value) if self.is_finished else None

    @property
    def drawing(self) -> Drawing:
        """Way in which the request's tokens are chosen, by which acceptance differs."""
        if not self.params.is_sampled:
            return Drawing.GREEDY
        return Drawing.SAMPLED if self.noise is None else Drawing.COUPLED

    @property
    def stage(self) -> Stage:
        """Current stage."""
        return self.params.stages[self.stats.stage]

    @property
    def pace_s(self) -> float | None:
        """Seconds per output token by which scheduling serves the current stage; None: no SLO.

        It is the stage's TPOT SLO (its TTFT SLO up to its first token) or, if that is less, the
        time that the E2E SLO left when the stage began, for each of the tokens that were left then.
        An E2E SLO with no time left then is missed, and no longer counts.
        """
        tpot_slo_s = self.stage.tpot_slo_s
        begin = self.stats.stage_begin
        if self.stage_due_s < math.inf:
            tpot_slo_s = self.stage.ttft_slo_s
        if self.params.e2e_slo_s is None or begin is None:
            return tpot_slo_s
        begun_s, num_before = begin
        num_left = self.params.max_new_tokens - num_before
        left_s = self.stats.arrived_s + self.params.e2e_slo_s - begun_s
        if left_s < LEAST_SLO_S * num_left or num_left <= 0:
            return tpot_slo_s
        per_token_s = left_s / num_left
        return per_token_s if tpot_slo_s is None else min(tpot_slo_s, per_token_s)

    @property
    def is_best_effort(self) -> bool:
        """Return whether it is served from leftover budget, and may be preempted."""
        return self.is_guaranteed is False

    @property
    def num_emitted(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_new_tokens - self.num_emitted

    @property
    def num_left_in_stage(self) -> int:
        """Tokens to the end of the current stage, if its length is known, else of the request.

        1 while the first token of a later stage is due.
        """
        if self.stage_due_s < math.inf:
            return 1
        stages = self.params.stages
        current = self.stats.stage
        num_tokens = self.stage.num_tokens
        if num_tokens is None or current + 1 == len(stages):  # no stage follows the last one
            return self.num_left
        return min(self.num_left, self._num_before_stage + num_tokens - self.num_emitted)

    @property
    def num_uncached(self) -> int:
        """Tokens that the target has not processed, the root included."""
        return len(self.tokens) - self.kv.num_cached

    @property
    def num_draft_behind(self) -> int:
        """Committed tokens that the drafter has not processed."""
        return len(self.tokens) - self.kv.num_draft_seen

    @property
    def is_decoding(self) -> bool:
        """Return whether only the root is uncached, and chosen by this engine; else it prefills."""
        return self.num_emitted > self.stats.num_resumed and self.num_uncached == 1

    @property
    def num_unread(self) -> int:
        """Prompt positions, but for the last, whose logits are still to be taken."""
        reader = self.params.prompt_reader
        return 0 if reader is None else max(self.prompt_len - 1 - reader.num_read, 0)

    def emit(self, token: int) -> bool:
        """Commit one token, and return whether the request has finished."""
        self.tokens.append(token)
        if self.params.is_stop(self.tokens):
            self.state = RequestState.STOP
        elif self.num_left <= 0:
            self.state = RequestState.LENGTH
        stages = self.params.stages
        current = self.stats.stage + len(self._ends)
        if current + 1 < len(stages):
            num_tokens = stages[current].num_tokens
            num_before = self._ends[-1] if self._ends else self._num_before_stage
            is_full = num_tokens is not None and self.num_emitted - num_before >= num_tokens
            if is_full or stages[current].is_over(self.tokens):
                self._ends.append(self.num_emitted)
        return self.is_finished

    def _resume(self, progress: Progress, now_s: float) -> None:
        stats = self.stats
        for token in progress.tokens:
            if self.emit(token):
                raise InvalidInputError(
                    f"progress has a finished output, of {self.num_emitted} tokens; resume only unfinished requests"
                )
            for end in self._ends:
                self._next_stage(end, now_s)
            self._ends.clear()
        if self.num_emitted > self._num_before_stage:
            self.stage_due_s = math.inf
        stats.arrived_s = now_s - progress.elapsed_s
        stats.num_resumed = self.num_emitted
        if progress.tokens:
            stats.first_token_s = now_s - progress.decoding_s
            stats.last_token_s = now_s
            stats.stage_begin = (
                (now_s, self.num_emitted) if stats.stage else (stats.first_token_s, 1)
            )
        stats.num_drafted = progress.drafted
        stats.acceptance_histogram = list(progress.acceptance_histogram)
        stats.has_missed = progress.has_missed
        stats.has_missed_window = progress.has_missed_window

    def progress(self, now_s: float) -> Progress:
        """Return the output so far, with which another engine can resume the request."""
        stats = self.stats
        begun_s = now_s if stats.first_token_s is None else stats.first_token_s
        return Progress(
            self.tokens[self.prompt_len :],
            elapsed_s=now_s - stats.arrived_s,
            decoding_s=now_s - begun_s,
            drafted=stats.num_drafted,
            acceptance_histogram=tuple(stats.acceptance_histogram),
            has_missed=stats.has_missed,
            has_missed_window=stats.has_missed_window,
        )

    def record_step(
        self,
        num_drafted: int,
        num_accepted: int,
        expected_tokens: float,
        phases: PhaseTimes,
        now_s: float,
    ) -> None:
        """Record one step that committed tokens at ``now_s``."""
        stats = self.stats
        if stats.first_token_s is None:
            stats.first_token_s = now_s
            stats.stage_begin = now_s, self.num_emitted
        else:
            histogram = stats.acceptance_histogram
            histogram.extend([0] * (num_accepted + 1 - len(histogram)))
            histogram[num_accepted] += 1
            stats.expected_tokens += expected_tokens
        stats.last_token_s = now_s
        stats.num_drafted += num_drafted
        stats.phases += phases
        stats.commits.append(Commit(self.num_emitted, now_s, num_drafted + 1, num_accepted))
        self._take_first(now_s)
        self._end_windows(self._ends[0] if self._ends else self.num_emitted, now_s)
        for end in self._ends:
            stats.has_missed |= self._is_late(end, now_s)
            self._next_stage(end, now_s)
            self._take_first(now_s)
        self._ends.clear()

    def _take_first(self, now_s: float) -> None:
        """Check the TTFT SLO of a later stage whose first token has come; TPOT and windows count
        from it on.
        """
        if self.stage_due_s < math.inf and self.num_emitted > self._num_before_stage:
            self.stats.has_missed |= now_s > self.stage_due_s
            self.stats.stage_begin = now_s, self._num_before_stage + 1
            self.stats.first_open = max(len(self.stats.commits) - 1, 0)
            self.stage_due_s = math.inf

    def _end_windows(self, end: int, now_s: float) -> None:
        """End the windows of ten tokens that the latest commit completes, with this stage's tokens
        up to ``end``.

        A window begins with the last token of a commit; those that begin with its other tokens end
        no later."""
        stats = self.stats
        tpot_slo_s = self.stage.tpot_slo_s
        while end - (begin := stats.commits[stats.first_open]).num_emitted >= WINDOW:
            stats.first_open += 1
            if tpot_slo_s is not None:
                stats.has_missed_window |= now_s - begin.at_s > WINDOW * tpot_slo_s

    def _next_stage(self, num_before: int, now_s: float) -> None:
        self.stats.stage += 1
        self._num_before_stage = num_before
        self.stats.stage_begin = now_s, num_before
        self.stats.first_open = max(len(self.stats.commits) - 1, 0)
        ttft_slo_s = self.stage.ttft_slo_s
        self.stage_due_s = math.inf if ttft_slo_s is None else now_s + ttft_slo_s

    def decoded(self, now_s: float) -> tuple[float, int]:
        """Return seconds and tokens since the current stage began to count.

        That is its first token in the first stage, and in others with a TTFT SLO once it has come;
        else the end of the stage before.
        """
        if self.stats.stage_begin is None:
            return 0.0, 0
        begun_s, num_before = self.stats.stage_begin
        return now_s - begun_s, self.num_emitted - num_before

    @property
    def has_open_guarantee(self) -> bool:
        """Return whether windows of ten tokens are guaranteed, none was missed, and one is open."""
        is_kept = self.window_guarantee is not None and not self.stats.has_missed_window
        return (
            is_kept
            and self.stage_due_s == math.inf
            and self.stage.tpot_slo_s is not None
            and bool(self.stats.commits)
        )

    def tightest_window(self, now_s: float, token_s: float) -> tuple[float, int]:
        """Return seconds and tokens since the beginning of the open window that is furthest behind
        a pace.

        Args:
            token_s: the pace in seconds per token.
        """
        open_windows = self.stats.commits[self.stats.first_open :]
        begin = min(open_windows, key=lambda commit: commit.at_s - token_s * commit.num_emitted)
        return now_s - begin.at_s, self.num_emitted - begin.num_emitted

    def paced(self, now_s: float) -> tuple[float, int, int]:
        """Return elapsed seconds, tokens emitted and tokens left of the stage or window to pace.

        While windows of ten tokens are guaranteed and none was missed, it is the window furthest
        behind; otherwise it is the current stage."""
        if not self.has_open_guarantee:
            return *self.decoded(now_s), self.num_left_in_stage
        elapsed_s, emitted = self.tightest_window(now_s, self.pace_s or 0.0)
        return elapsed_s, emitted, min(WINDOW - emitted, self.num_left_in_stage)

    def _is_late(self, end: int, now_s: float) -> bool:
        """Return whether the current stage missed its TPOT SLO if its last token is the new token
        number ``end``.
        """
        slo_s = self.stage.tpot_slo_s
        elapsed_s, emitted = self.decoded(now_s)
        emitted -= self.num_emitted - end
        return slo_s is not None and emitted > 0 and elapsed_s / emitted > slo_s

    def end(self, error: BaseException | None) -> None:
        """End the request early, as failed with an error or, without one, as cancelled."""
        self.error = error
        self.state = RequestState.CANCELLED if error is None else RequestState.ERROR

    def drop_hooks(self) -> None:
        """Drop what only decoding needs, so that a stored request refers to no model or sampler."""
        self.params = replace(self.params, prefill=None, prompt_reader=None, grammar=None)
        self.noise = None

    def metrics(self) -> RequestMetrics:
        """Return SLOs and measurements so far."""
        params = self.params
        stats = self.stats
        has_begun = self.stats.first_token_s is not None
        first_s = stats.last_token_s if stats.first_token_s is None else stats.first_token_s
        num_gaps = self.num_emitted - 1
        elapsed_s, emitted = self.decoded(stats.last_token_s)
        ttft_s = first_s - stats.arrived_s
        e2e_s = stats.last_token_s - stats.arrived_s
        tpot_slo_s = self.stage.tpot_slo_s
        is_late = stats.has_missed or self._is_late(self.num_emitted, stats.last_token_s)
        is_late |= params.ttft_slo_s is not None and ttft_s > params.ttft_slo_s
        is_late |= params.e2e_slo_s is not None and e2e_s > params.e2e_slo_s
        return RequestMetrics(
            tpot_slo_s=tpot_slo_s,
            tpot_s=(stats.last_token_s - first_s) / num_gaps if num_gaps > 0 else None,
            ttft_s=ttft_s if has_begun else None,
            attained=not is_late if params.has_slo and has_begun else None,
            tokens=self.num_emitted,
            steps=stats.num_steps,
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            slack_s=None if tpot_slo_s is None else tpot_slo_s * emitted - elapsed_s,
            worst_tpot_s=worst_tpot_s(stats.commits),
            expected_tokens=stats.expected_tokens,
            phases=stats.phases,
            ttft_slo_s=params.ttft_slo_s,
            guaranteed=bool(self.is_guaranteed),
            preempted=stats.num_preempted,
            reused=self.kv.num_reused,
            resumed=stats.num_resumed,
            window_guarantee=self.window_guarantee,
            windows_kept=self._has_kept_windows(),
            e2e_slo_s=params.e2e_slo_s,
            e2e_s=e2e_s if has_begun else None,
            acceptance_histogram=tuple(stats.acceptance_histogram),
            earlier=params.earlier,
        )

    def _has_kept_windows(self) -> bool | None:
        if not self.stats.commits or all(stage.tpot_slo_s is None for stage in self.params.stages):
            return None
        return not self.stats.has_missed_window
