"""One request: its tokens, its SLOs and its measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hf_slospec.algo.acceptance import Drawing
from hf_slospec.algo.metrics import is_attained, tpot_s, worst_tpot_s
from hf_slospec.engine.events import Commit, PhaseTimes
from hf_slospec.errors import InvalidInputError

IsOver = Callable[[list[int]], bool]  # all tokens of a request -> whether its output or stage ends with the last one
LEAST_SLO_S = 1e-9  # shortest SLO; quotients by shorter ones overflow
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Stage:
    """Part of a request's output with a TPOT SLO."""

    tpot_slo_s: float | None  # seconds per output token; None: no SLO
    num_tokens: int | None = None  # the stage ends after so many tokens
    is_over: IsOver = lambda tokens: False  # or with the token for which this returns True


class Noise(Protocol):
    """Noise that will choose a sampled request's tokens, for drafters that use it."""

    def after(self, depth: int) -> Any:
        """Return the noise of the token after a draft node at this depth (root: 0).  -> [vocab] f32 tensor

        It is Exp(1) noise: the target takes the token with the highest ``probability / noise``. A proposal that the
        target takes with probability p without knowing its noise q is taken with exp(-q (1 - p) / p) once q is known.
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
    steps: int = 0  # verify steps
    drafted: int = 0  # nodes verified, roots not counted
    accepted: int = 0  # nodes that were committed
    has_missed: bool = False  # a finished stage missed its SLO


@dataclass(eq=False)
class Request:
    """A sequence being decoded. ``tokens`` holds the prompt and every committed token."""

    index: int  # row of the batch, or number since the batcher's start; breaks ties
    tokens: list[int]
    max_new_tokens: int
    stages: tuple[Stage, ...] = (Stage(None),)
    is_stop: IsOver = lambda tokens: False  # checked after every token, on all tokens
    arrived_s: float = 0.0
    is_sampled: bool = False
    noise: Noise | None = None  # noise of a sampled request; None if it cannot be known in advance
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    priority: int = 0  # lower goes first
    is_guaranteed: bool = False  # the batcher guarantees the SLOs
    is_best_effort: bool = False  # uses leftover budget, and may be preempted
    cache_salt: str = ""  # K/V is shared only between requests of equal salt
    must_guarantee: bool = False  # refuse the request unless its SLOs are guaranteed when it arrives
    num_padding: int = 0  # tokens by which the prompt is shorter than the longest one of its batch
    prefill: Callable[[], Any] | None = None  # prefills the whole prompt, if that cannot be done in chunks
    prompt_reader: PromptReader | None = None  # takes the prompt's logits; None: they are not needed

    num_resumed: int = 0  # new tokens that another engine had committed
    num_cached: int = 0  # tokens whose K/V the target holds
    num_draft_seen: int = 0  # tokens that the drafter has processed
    first_token_s: float | None = None
    last_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None  # error of the request's processors or criteria, which ended it
    num_reused: int = 0  # tokens of the prompt whose K/V another request had computed
    num_preempted: int = 0  # times the request was preempted
    num_steps: int = 0  # verify steps, prefill not counted
    num_drafted: int = 0  # nodes verified, roots not counted
    num_accepted: int = 0  # drafted nodes that were committed
    expected_tokens: float = 0.0  # sum over its verify steps of the tokens that the policy expected
    phases: PhaseTimes = field(default_factory=PhaseTimes)  # sum over its steps
    commits: list[Commit] = field(default_factory=list)  # one per step that committed tokens
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self._stage, self._stage_emitted_before, self._stage_ended = 0, 0, False
        self._stage_begin: tuple[float, int] | None = None  # time in seconds, and tokens emitted before
        self._missed_stage = False

    @property
    def is_finished(self) -> bool:
        """Return whether the request stopped, reached its length, failed or was cancelled."""
        return self.finish_reason is not None

    @property
    def drawing(self) -> Drawing:
        """Way in which the request's tokens are chosen, by which acceptance differs."""
        return Drawing.GREEDY if not self.is_sampled else Drawing.SAMPLED if self.noise is None else Drawing.COUPLED

    @property
    def tpot_slo_s(self) -> float | None:
        """TPOT SLO of the current stage, in seconds; None: no SLO."""
        return self.stages[self._stage].tpot_slo_s

    @property
    def num_emitted(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - self.num_emitted

    @property
    def max_len(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self.prompt_len + self.max_new_tokens

    @property
    def num_left_in_stage(self) -> int:
        """Tokens to the end of the current stage, if its length is known, else of the request."""
        num_tokens = self.stages[self._stage].num_tokens
        if num_tokens is None or self._stage + 1 == len(self.stages):  # no stage follows the last one
            return self.num_left
        return min(self.num_left, self._stage_emitted_before + num_tokens - self.num_emitted)

    @property
    def num_uncached(self) -> int:
        """Tokens that the target has not processed, the root included."""
        return len(self.tokens) - self.num_cached

    @property
    def num_draft_behind(self) -> int:
        """Committed tokens that the drafter has not processed."""
        return len(self.tokens) - self.num_draft_seen

    @property
    def is_decoding(self) -> bool:
        """Return whether only the root is uncached and this engine has chosen it; if not, the request is in prefill."""
        return self.num_emitted > self.num_resumed and self.num_uncached == 1

    @property
    def num_unread(self) -> int:
        """Prompt positions whose logits are still to be taken; those of the last position are not needed."""
        return 0 if self.prompt_reader is None else max(self.prompt_len - 1 - self.prompt_reader.num_read, 0)

    @property
    def has_slo(self) -> bool:
        """Return whether there is a TTFT SLO, or a TPOT SLO in any stage."""
        return self.ttft_slo_s is not None or any(stage.tpot_slo_s is not None for stage in self.stages)

    def emit(self, token: int) -> bool:
        """Commit one token, and return whether the request has finished."""
        self.tokens.append(token)
        if self.is_stop(self.tokens):
            self.finish_reason = "stop"
        elif self.num_left <= 0:
            self.finish_reason = "length"
        if self._stage + 1 < len(self.stages) and not self._stage_ended:
            stage = self.stages[self._stage]
            is_full = stage.num_tokens is not None and self.num_emitted - self._stage_emitted_before >= stage.num_tokens
            self._stage_ended = is_full or stage.is_over(self.tokens)
        return self.is_finished

    def resume(self, progress: Progress, now_s: float) -> None:
        """Continue at ``now_s`` the output of another engine; the request must be new.

        The first stage counts time and tokens from the first token on, a later stage from ``now_s`` on.

        Raises:
            InvalidInputError: the output is finished.
        """
        self.arrived_s = now_s - progress.elapsed_s
        for token in progress.tokens:
            if self.emit(token):
                self.finish_reason = None
                raise InvalidInputError(
                    f"progress has a finished output, of {self.num_emitted} tokens; resume only unfinished requests"
                )
            if self._stage_ended:
                self._next_stage(now_s)
        self.num_resumed = self.num_emitted
        if self.num_resumed:
            self.first_token_s, self.last_token_s = now_s - progress.decoding_s, now_s
            self._stage_begin = (now_s, self.num_emitted) if self._stage else (self.first_token_s, 1)
        self.num_steps, self.num_drafted, self.num_accepted = progress.steps, progress.drafted, progress.accepted
        self._missed_stage = progress.has_missed

    def progress(self, now_s: float) -> Progress:
        """Return the output so far, for :meth:`resume`."""
        begun_s = now_s if self.first_token_s is None else self.first_token_s
        return Progress(
            self.tokens[self.prompt_len :], now_s - self.arrived_s, now_s - begun_s,
            self.num_steps, self.num_drafted, self.num_accepted, self._missed_stage,
        )  # fmt: skip

    def record_step(
        self, num_drafted: int, num_accepted: int, expected_tokens: float, phases: PhaseTimes, now_s: float
    ) -> None:
        """Record one step that committed tokens at ``now_s``."""
        if self.first_token_s is None:
            self.first_token_s = now_s
            self._stage_begin = now_s, self.num_emitted
        else:
            self.num_steps += 1
            self.expected_tokens += expected_tokens
        self.last_token_s = now_s
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.phases += phases
        self.commits.append(Commit(self.num_emitted, now_s, num_drafted + 1, num_accepted))
        if self._stage_ended:
            self._missed_stage |= self._is_late(now_s)
            self._next_stage(now_s)

    def _next_stage(self, now_s: float) -> None:
        self._stage, self._stage_emitted_before, self._stage_ended = self._stage + 1, self.num_emitted, False
        self._stage_begin = now_s, self.num_emitted

    def decoded(self, now_s: float) -> tuple[float, int]:
        """Return seconds and tokens since the current stage began; the first stage begins with the first token."""
        if self._stage_begin is None:
            return 0.0, 0
        begun_s, num_before = self._stage_begin
        return now_s - begun_s, self.num_emitted - num_before

    def _is_late(self, now_s: float) -> bool:
        elapsed_s, emitted = self.decoded(now_s)
        return is_attained(elapsed_s / emitted if emitted else None, self.tpot_slo_s) is False

    def end(self, error: BaseException | None) -> None:
        """End the request early, as failed with an error or, without one, as cancelled."""
        self.error, self.finish_reason = error, "cancelled" if error is None else "error"

    def metrics(self) -> RequestMetrics:
        """Return SLOs and measurements so far."""
        has_begun = self.first_token_s is not None
        first_s = self.last_token_s if self.first_token_s is None else self.first_token_s
        measured_s = tpot_s(first_s, self.last_token_s, self.num_emitted)
        elapsed_s, emitted = self.decoded(self.last_token_s)
        ttft_s = first_s - self.arrived_s
        is_late = self._missed_stage or self._is_late(self.last_token_s)
        is_late |= self.ttft_slo_s is not None and ttft_s > self.ttft_slo_s
        return RequestMetrics(
            tpot_slo_s=self.tpot_slo_s,
            tpot_s=measured_s,
            ttft_s=ttft_s if has_begun else None,
            attained=not is_late if self.has_slo and has_begun else None,
            tokens=self.num_emitted,
            steps=self.num_steps,
            drafted=self.num_drafted,
            accepted=self.num_accepted,
            slack_s=None if self.tpot_slo_s is None else self.tpot_slo_s * emitted - elapsed_s,
            worst_tpot_s=worst_tpot_s([(commit.num_emitted, commit.at_s) for commit in self.commits]),
            expected_tokens=self.expected_tokens,
            phases=self.phases,
            ttft_slo_s=self.ttft_slo_s,
            guaranteed=self.is_guaranteed,
            preempted=self.num_preempted,
            reused=self.num_reused,
            resumed=self.num_resumed,
        )


@dataclass(frozen=True)
class RequestMetrics:
    """SLOs and measurements of a request."""

    tpot_slo_s: float | None  # seconds per output token in the last stage; None: no SLO
    tpot_s: float | None  # seconds, (last - first token) / (tokens - 1); None for fewer than two tokens
    ttft_s: float | None  # seconds from arrival to the first token; None before it
    attained: bool | None  # TPOT SLOs of every stage and the TTFT SLO were met; None without an SLO or a token
    tokens: int  # committed, the first one included
    steps: int  # verify steps after the prefill
    drafted: int  # draft tokens verified: nodes of all verified trees, roots not counted
    accepted: int  # drafted nodes that were committed
    slack_s: float | None  # seconds by which the last token was early, by the last stage's SLO; negative: late
    worst_tpot_s: float | None  # highest seconds per token over 10 consecutive tokens (SLOs-Serve); None below 11
    expected_tokens: float  # tokens that the policy expected the steps to commit, prefill not counted
    phases: PhaseTimes  # seconds by phase of the request's steps, which other requests share
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    guaranteed: bool = False  # the batcher guaranteed its SLOs
    preempted: int = 0  # times the batcher preempted the request
    reused: int = 0  # tokens of the prompt whose K/V another request of the batcher had computed
    resumed: int = 0  # tokens that another engine had committed before this one resumed the request

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verify step; None if there was no step after prefill."""
        return (self.tokens - 1) / self.steps if self.steps else None
