"""One request: its tokens, its target and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_slospec.algo.metrics import is_attained, tpot_s


@dataclass(eq=False)
class Request:
    """A sequence being decoded. ``tokens`` holds the prompt and everything committed so far."""

    index: int  # position in its batch; fixes the order of ties
    tokens: list[int]
    max_new_tokens: int
    target_s: float | None = None  # TPOT target in seconds; None: no promise
    is_stop: Callable[[list[int]], bool] = lambda tokens: False  # checked after every token, on all tokens
    arrived_s: float = 0.0

    first_token_s: float | None = None
    last_token_s: float = 0.0
    is_finished: bool = False
    num_steps: int = 0  # verify steps, the prefill not counted
    num_drafted: int = 0  # nodes verified, roots not counted
    num_accepted: int = 0  # of those, committed
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - self.num_emitted

    @property
    def is_prefilled(self) -> bool:
        return self.num_emitted > 0

    def emit(self, token: int) -> bool:
        """Commit one token.  -> whether the request is finished with it."""
        self.tokens.append(token)
        self.is_finished = self.num_left <= 0 or self.is_stop(self.tokens)
        return self.is_finished

    def account(self, num_drafted: int, num_accepted: int, now_s: float) -> None:
        """Book one step that committed tokens at ``now_s``."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.num_steps += 1
        self.last_token_s = now_s
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def elapsed_s(self, now_s: float) -> float:
        """Decode time so far: seconds since the first token."""
        return 0.0 if self.first_token_s is None else now_s - self.first_token_s

    def metrics(self) -> RequestMetrics:
        first_s = self.last_token_s if self.first_token_s is None else self.first_token_s
        measured = tpot_s(first_s, self.last_token_s, self.num_emitted)
        return RequestMetrics(
            target_s=self.target_s,
            tpot_s=measured,
            ttft_s=first_s - self.arrived_s,
            attained=is_attained(measured, self.target_s),
            tokens=self.num_emitted,
            steps=self.num_steps,
            drafted=self.num_drafted,
            accepted=self.num_accepted,
        )


@dataclass(frozen=True)
class RequestMetrics:
    """What was promised to a request and what it got."""

    target_s: float | None
    tpot_s: float | None  # (last - first token) / (tokens - 1); None for fewer than two tokens
    ttft_s: float
    attained: bool | None  # None without a target
    tokens: int  # committed, the first one included
    steps: int  # verify steps after the prefill
    drafted: int  # nodes verified, roots not counted
    accepted: int  # of those, committed

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verify step; None if there was no step after the prefill."""
        return (self.tokens - 1) / self.steps if self.steps else None
