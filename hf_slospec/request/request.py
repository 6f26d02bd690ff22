"""One request: its tokens, its SLOs and its measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from hf_slospec.engine.acceptance import Drawing
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.errors import InvalidInputError
from hf_slospec.request.metrics import WINDOW, is_attained, tpot_s, worst_tpot_s

# All tokens of a request -> whether its output or stage ends with the last one, which the function
# may replace.
IsOver = Callable[[list[int]], bool]
LEAST_SLO_S = 1e-9  # shortest SLO; quotients by shorter ones overflow
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Stage:
    """Part of a request's output with SLOs of its own."""

    tpot_slo_s: float | None  # seconds per output token; None: no SLO
    num_tokens: int | None = None  # the stage ends after so many tokens
    is_over: IsOver = lambda tokens: False  # or with the token for which this returns True
    # Seconds from the end of the stage before to the first token; with one, TPOT counts from that
    # token on. The first stage has the TTFT SLO of the request in its place.
    ttft_slo_s: float | None = None


class Noise(Protocol):
    """Noise that will choose a sampled request's tokens, for drafters that use it."""

    def after(self, depth: int) -> Any:
        """Return the noise of the token after a draft node at this depth (root: 0).  -> [vocab] f32
        tensor

        It is Exp(1) noise: the target takes the token with the highest ``probability / noise``. A
        proposal that the target takes with probability p without knowing its noise q is taken with
        exp(-q (1 - p) / p) once q is known."""


NewNoise = Callable[["Request"], Noise | None]  # request -> noise, if it can be known in advance


class Grammar(Protocol):
    """Rules that the output of a request follows, for its drafts; token ids are new tokens, the
    last ones proposed.
    """

    def allows(self, token_ids: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """Return for each proposed token whether it may follow the others."""

    def expected(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each way to go on, as far as the grammar leaves little choice."""

    def masked(self, token_ids: Sequence[Sequence[int]], scores: Any) -> Any:
        """Return a draft's scores with -inf for tokens that may not follow, both [num_nodes, vocab]
        tensors.

        ``token_ids``: those up to each node.
        """


class PromptReader(Protocol):
    """Takes the logits of a prompt's positions while the target prefills it."""

    @property
    def num_read(self) -> int:
        """Return the number of prompt positions whose logits were taken."""

    def take(self, logits: Any) -> None:
        """Take the logits of the prompt's next positions, [num_tokens, vocab] in the model's dtype."""


@dataclass(frozen=True)
class Progress:
    """Output so far of a request, with which another engine can resume it."""

    tokens: list[int]  # new tokens
    elapsed_s: float = 0.0  # since the request arrived
    decoding_s: float = 0.0  # since its first token
    drafted: int = 0  # nodes verified, roots not counted
    acceptance_histogram: Sequence[
        int
    ] = ()  # verify steps by the number of drafted nodes that they committed
    has_missed: bool = False  # a finished stage missed its SLO
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage


@dataclass(frozen=True)
class RequestParams:
    """Prompt and options of a request. Its maker writes them, complete, before there is a
    :class:`Request`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stages: tuple[Stage, ...] = (Stage(None),)
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    priority: int = 0  # lower goes first
    is_best_effort: bool = False  # no SLO is to be guaranteed
    must_guarantee: bool = (
        False  # refuse the request unless its SLOs are guaranteed when it arrives
    )
    cache_salt: str = ""  # K/V is shared only between requests of equal salt
    is_sampled: bool = False
    row: int = 0  # index in the batch of its call
    num_padding: int = 0  # tokens by which the prompt is shorter than the longest one of its batch
    is_stop: IsOver = lambda tokens: False  # checked after every token, on all tokens
    prefill: Callable[[], Any] | None = (
        None  # prefills the whole prompt, if that cannot be done in chunks
    )
    encoded_for: Callable[[Any], Any] | None = (
        None  # model -> what its decoder attends to of an encoder's outputs
    )
    prompt_reader: PromptReader | None = (
        None  # takes the prompt's logits; None: they are not needed
    )
    may_draft: bool = True  # False: one token per step, whatever the policy plans
    has_callbacks: bool = (
        False  # processors, criteria or a streamer of the user's are called as tokens are chosen
    )
    ends_with_others: bool = (
        False  # the output is returned with those of all other requests, once the last one ends
    )
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    grammar: Grammar | None = (
        None  # what drafts follow, as the output does; None: the output is free
    )
    earlier: RequestMetrics | None = (
        None  # those of the request that this one continues after a pause
    )
    value: int = (
        1  # Relative value of meeting its SLOs, within its priority, if not all can be guaranteed
    )

    @property
    def max_len(self) -> int:
        """Maximum tokens of prompt and output together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def has_slo(self) -> bool:
        """Return whether there is a TTFT SLO, an E2E SLO, or an SLO of any stage."""
        return self.ttft_slo_s is not None or self.e2e_slo_s is not None or bool(self.stage_slos_s)

    @property
    def stage_slos_s(self) -> list[float]:
        """TPOT SLOs of all stages, and TTFT SLOs of all but the first: what decode steps have to
        keep, in seconds.
        """
        slos_s = [stage.tpot_slo_s for stage in self.stages] + [
            stage.ttft_slo_s for stage in self.stages[1:]
        ]
        return [slo_s for slo_s in slos_s if slo_s is not None]


@dataclass
class RequestKV:
    """Counts of a request's tokens that the models have processed.

    ``Engine.step`` writes them; a ``generate`` call that is given a cache writes ``num_cached``
    before the first step."""

    num_cached: int = 0  # tokens whose K/V the target holds
    num_draft_seen: int = 0  # tokens that the drafter has processed
    num_reused: int = 0  # tokens of the prompt whose K/V another request had computed


@dataclass
class RequestStats:
    """Times and counts of a request. :class:`Request` writes them; the scheduler counts preemptions
    and entries.
    """

    arrived_s: float
    entered_s: float | None = (
        None  # when the request first got slots of K/V; None before, and in a static batch
    )
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_resumed: int = 0  # new tokens that another engine had committed
    num_preempted: int = 0  # times the request was preempted
    num_drafted: int = 0  # nodes verified, roots not counted
    acceptance_histogram: list[int] = field(
        default_factory=list
    )  # verify steps by committed drafted nodes
    expected_tokens: float = 0.0  # sum over its verify steps of the tokens that the policy expected
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # sum over its steps
    commits: list[Commit] = field(default_factory=list)  # one per step that committed tokens
    stage: int = 0  # index of the current stage
    stage_begin: tuple[float, int] | None = None  # seconds, and tokens emitted before
    has_missed: bool = False  # a finished stage missed its SLO
    # Index of the commit that begins the oldest window of ten tokens of this stage without an end
    first_open: int = 0
    has_missed_window: bool = False  # a window of ten tokens missed the SLO of its stage

    @property
    def num_steps(self) -> int:
        """Return the number of verify steps, prefill not counted."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted(self) -> int:
        """Return the number of drafted nodes that were committed."""
        return sum(number * count for number, count in enumerate(self.acceptance_histogram))


class Request:
    """A sequence being decoded: what was asked for (``params``), tokens, K/V (``kv``), times and
    counts (``stats``).

    Drafters and policies read it. ``tokens`` holds the prompt and every committed token; ``emit``
    and ``end`` write it and how the request ended, or the loop of stock ``generate`` where that
    decodes. The scheduler writes ``is_guaranteed`` and ``window_guarantee``, and a drafter sets
    ``noise`` to None if it cannot use it."""

    finish_reason: FinishReason | None = None
    error: BaseException | None = (
        None  # error of the request's processors or criteria, which ended it
    )
    is_guaranteed: bool | None = (
        None  # the batcher guarantees the SLOs; None: no batcher has decided
    )
    window_guarantee: float | None = (
        None  # probability with which every window of ten tokens meets the TPOT SLO
    )
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
        self._ends: list[
            int
        ] = []  # new tokens up to the end of each stage that the current step ends
        if progress is not None:
            self._resume(progress, arrived_s)
        self.noise = None if new_noise is None else new_noise(self)

    @property
    def is_finished(self) -> bool:
        """Return whether the request stopped, reached its length, failed or was cancelled."""
        return self.finish_reason is not None

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
        """Return whether a batcher serves the request from leftover budget, and may preempt it."""
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
        """Return whether only the root is uncached and this engine has chosen it; if not, the
        request is in prefill.
        """
        return self.num_emitted > self.stats.num_resumed and self.num_uncached == 1

    @property
    def num_unread(self) -> int:
        """Prompt positions whose logits are still to be taken; those of the last position are not
        needed.
        """
        reader = self.params.prompt_reader
        return 0 if reader is None else max(self.prompt_len - 1 - reader.num_read, 0)

    def emit(self, token: int) -> bool:
        """Commit one token, and return whether the request has finished."""
        self.tokens.append(token)
        if self.params.is_stop(self.tokens):
            self.finish_reason = "stop"
        elif self.num_left <= 0:
            self.finish_reason = "length"
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
        stats.num_drafted, stats.acceptance_histogram = (
            progress.drafted,
            list(progress.acceptance_histogram),
        )
        stats.has_missed = progress.has_missed
        stats.has_missed_window = progress.has_missed_window

    def progress(self, now_s: float) -> Progress:
        """Return the output so far, with which another engine can resume the request."""
        stats = self.stats
        begun_s = now_s if stats.first_token_s is None else stats.first_token_s
        return Progress(
            self.tokens[self.prompt_len :], now_s - stats.arrived_s, now_s - begun_s,
            stats.num_drafted, tuple(stats.acceptance_histogram), stats.has_missed, stats.has_missed_window,
        )  # fmt: skip

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
        self.stats.stage = self.stats.stage + 1
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
        """Return seconds and tokens so far, and tokens left, of what has to keep the pace.

        That is the current stage or, while windows of ten tokens are guaranteed and kept, the one
        furthest behind."""
        if not self.has_open_guarantee:
            return *self.decoded(now_s), self.num_left_in_stage
        elapsed_s, emitted = self.tightest_window(now_s, self.pace_s or 0.0)
        return elapsed_s, emitted, min(WINDOW - emitted, self.num_left_in_stage)

    def _is_late(self, end: int, now_s: float) -> bool:
        """Return whether the current stage missed its TPOT SLO if its last token is the new token
        number ``end``.
        """
        elapsed_s, emitted = self.decoded(now_s)
        emitted -= self.num_emitted - end
        return (
            is_attained(elapsed_s / emitted if emitted > 0 else None, self.stage.tpot_slo_s)
            is False
        )

    def end(self, error: BaseException | None) -> None:
        """End the request early, as failed with an error or, without one, as cancelled."""
        self.error = error
        self.finish_reason = "cancelled" if error is None else "error"

    def drop_hooks(self) -> None:
        """Drop the functions that only decoding needs: a request that is kept must not keep models
        and samplers.
        """
        self.params, self.noise = (
            replace(self.params, prefill=None, prompt_reader=None, grammar=None),
            None,
        )

    def metrics(self) -> RequestMetrics:
        """Return SLOs and measurements so far."""
        params = self.params
        stats = self.stats
        has_begun = self.stats.first_token_s is not None
        first_s = stats.last_token_s if stats.first_token_s is None else stats.first_token_s
        measured_s = tpot_s(first_s, stats.last_token_s, self.num_emitted)
        elapsed_s, emitted = self.decoded(stats.last_token_s)
        ttft_s = first_s - stats.arrived_s
        e2e_s = stats.last_token_s - stats.arrived_s
        tpot_slo_s = self.stage.tpot_slo_s
        is_late = stats.has_missed or self._is_late(self.num_emitted, stats.last_token_s)
        is_late |= params.ttft_slo_s is not None and ttft_s > params.ttft_slo_s
        is_late |= params.e2e_slo_s is not None and e2e_s > params.e2e_slo_s
        return RequestMetrics(
            tpot_slo_s=tpot_slo_s,
            tpot_s=measured_s,
            ttft_s=ttft_s if has_begun else None,
            attained=not is_late if params.has_slo and has_begun else None,
            tokens=self.num_emitted,
            steps=stats.num_steps,
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            slack_s=None if tpot_slo_s is None else tpot_slo_s * emitted - elapsed_s,
            worst_tpot_s=worst_tpot_s(
                [(commit.num_emitted, commit.at_s) for commit in stats.commits]
            ),
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


@dataclass(frozen=True)
class RequestMetrics:
    """SLOs and measurements of a request."""

    tpot_slo_s: float | None  # seconds per output token in the last stage; None: no SLO
    tpot_s: (
        float | None
    )  # seconds, (last - first token) / (tokens - 1); None for fewer than two tokens
    ttft_s: float | None  # seconds from arrival to the first token; None before it
    attained: (
        bool | None
    )  # SLOs of every stage, TTFT and E2E SLOs were met; None without an SLO or a token
    tokens: int  # committed, the first one included
    steps: int  # verify steps after the prefill
    drafted: int  # draft tokens verified: nodes of all verified trees, roots not counted
    accepted: int  # drafted nodes that were committed
    slack_s: (
        float | None
    )  # seconds by which the last token was early, by the last stage's SLO; negative: late
    worst_tpot_s: (
        float | None
    )  # highest seconds per token over 10 consecutive tokens (SLOs-Serve); None below 11
    expected_tokens: (
        float  # tokens that the policy expected the steps to commit, prefill not counted
    )
    phases: PhaseTimes  # seconds by phase of the request's steps, which other requests share
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    guaranteed: bool = False  # the batcher guaranteed its SLOs
    preempted: int = 0  # times the batcher preempted the request
    reused: int = 0  # tokens of the prompt whose K/V another request had computed
    resumed: int = 0  # tokens that another engine had committed before this one resumed the request
    window_guarantee: float | None = (
        None  # probability with which windows_kept was guaranteed; None: it was not
    )
    windows_kept: bool | None = (
        None  # every window of 10 tokens met the TPOT SLO of its stage; None without an SLO
    )
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    e2e_s: float | None = None  # seconds from arrival to the latest token; None before the first
    acceptance_histogram: tuple[
        int, ...
    ] = ()  # verify steps that accepted 0 drafted nodes, 1, and so on
    earlier: RequestMetrics | None = (
        None  # those of the request that this one continues; the pause is in neither
    )

    @property
    def attained_throughout(self) -> bool | None:
        """Return whether this request and those that it continues attained their SLOs; None without
        any SLO.
        """
        known = list[bool]()
        part: RequestMetrics | None = self
        while part is not None:
            known += [] if part.attained is None else [part.attained]
            part = part.earlier
        return all(known) if known else None

    @property
    def guaranteed_throughout(self) -> bool:
        """Return whether the SLOs of this request and of all those that it continues were
        guaranteed.
        """
        part: RequestMetrics | None = self
        while part is not None and part.guaranteed:
            part = part.earlier
        return part is None

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verify step; None if there was no step after prefill."""
        return (self.tokens - 1) / self.steps if self.steps else None
