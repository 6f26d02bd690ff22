"""Options that a caller gives to a request, and the parameters that are made of them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from hf_slospec.errors import InvalidInputError, InvalidTypeError, describe_validation_error
from hf_slospec.request.metrics import RequestMetrics
from hf_slospec.request.slo import LEAST_SLO_S, IsOver, Stage
from hf_slospec.request.state import Progress

IMPOSSIBLE = "impossible"  # the type is right, and the value contradicts itself or other options
VALUE_ERRORS = ("greater_than", "less_than", "finite", IMPOSSIBLE)  # of pydantic's error types
MAX_VALUE = 100  # the admission DP enumerates sums of values


class Noise(Protocol):
    """Noise that will choose a sampled request's tokens, for drafters that use it."""

    def after(self, depth: int) -> Any:
        """Return the noise of the token after a draft node at this depth (root: 0), a [vocab] f32
        tensor.

        It is Exp(1) noise: the target takes the token with the highest ``probability / noise``. A
        proposal that the target takes with probability p without knowing its noise q is taken with
        exp(-q (1 - p) / p) once q is known."""


class Grammar(Protocol):
    """Constraint on the output of a request that its drafts follow as well.

    Token ids are new tokens; proposed drafts come last.
    """

    def allows(self, token_ids: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """Return for each proposed token whether it may follow ``token_ids``."""

    def expected(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return likely continuations where the grammar leaves few choices."""

    def masked(self, token_ids: Sequence[Sequence[int]], scores: Any) -> Any:
        """Return draft scores, [num_nodes, vocab], with -inf for tokens that may not follow.

        ``token_ids`` has the tokens up to and including each node.
        """


class PromptReader(Protocol):
    """Takes the logits of a prompt's positions while the target prefills it."""

    logprobs: list[Any]  # log probabilities of the tokens read so far

    @property
    def num_read(self) -> int:
        """Number of prompt positions whose logits were taken."""

    def take(self, logits: Any) -> None:
        """Take the logits of the next positions, [num_tokens, vocab] in the model's dtype."""


class SubmitOptions(BaseModel):
    """Options of ``submit`` besides those of ``generate``; its defaults are those of ``generate``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    slo_ttft: float | None = Field(None, ge=LEAST_SLO_S)  # seconds
    slo_e2e: float | None = Field(None, ge=LEAST_SLO_S)  # seconds
    priority: int = 0
    value: int = Field(1, ge=1, le=MAX_VALUE)
    best_effort: bool = False
    speculative: bool = True
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=0, lt=2**64)
    block: bool = False
    timeout: float | None = Field(None, ge=0)  # seconds
    cache_salt: str = ""
    must_guarantee: bool = False
    resume: Progress | None = None
    logprobs: int | None = Field(None, ge=0)  # most probable tokens at each position
    prompt_logprobs: int | None = Field(None, ge=0)  # the same for the prompt's positions

    @field_validator("slo_ttft", "slo_e2e", "timeout", mode="before")
    @classmethod
    def _is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a bool is no number of seconds")
        return float(value) if isinstance(value, numbers.Real) else value  # numpy scalars

    @model_validator(mode="after")
    def _fit_together(self) -> SubmitOptions:
        if self.must_guarantee and self.best_effort:
            raise PydanticCustomError(
                IMPOSSIBLE, "must_guarantee and best_effort exclude each other; leave one out"
            )
        if self.slo_e2e is not None and self.slo_ttft is not None and self.slo_e2e <= self.slo_ttft:
            raise PydanticCustomError(
                IMPOSSIBLE,
                "slo_e2e is the time to the last token and must be longer than slo_ttft, that to the first, got "
                "{slo_e2e} and {slo_ttft} s; leave one out",
                {"slo_e2e": self.slo_e2e, "slo_ttft": self.slo_ttft},
            )
        return self

    @field_validator("resume")
    @classmethod
    def _is_sound(cls, progress: Progress | None) -> Progress | None:
        if progress is not None:
            if not all(type(token) is int and token >= 0 for token in progress.tokens):
                raise PydanticCustomError(
                    IMPOSSIBLE, "its tokens must be token ids; pass handle.progress"
                )
            if not 0 <= progress.decoding_s <= progress.elapsed_s < math.inf:
                raise PydanticCustomError(
                    IMPOSSIBLE, "its seconds must be finite, 0 <= decoding_s <= elapsed_s"
                )
        return progress

    @classmethod
    def of(cls, **values: Any) -> SubmitOptions:
        """Return validated options.

        Raises:
            InvalidTypeError, InvalidInputError: the message names the option, the problem and the
                value.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            is_value = error.errors()[0]["type"].startswith(VALUE_ERRORS)
            kind = InvalidInputError if is_value else InvalidTypeError
            raise kind(describe_validation_error(error)) from error


@dataclass(frozen=True)
class RequestParams:
    """Prompt and options of a request, complete before there is a :class:`Request`.

    ``generate.prepare`` makes them, for ``generate`` and ``submit`` alike.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stages: tuple[Stage, ...] = (Stage(None),)
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    priority: int = 0  # lower goes first
    is_best_effort: bool = False  # no SLO is to be guaranteed
    must_guarantee: bool = False  # refuse it unless its SLOs are guaranteed when it arrives
    cache_salt: str = ""  # K/V is shared only between requests of equal salt
    is_sampled: bool = False
    row: int = 0  # index in the batch of its call
    num_padding: int = 0  # left padding of the prompt in the batch of its call, in tokens
    is_stop: IsOver = lambda tokens: False  # checked after every token, on all tokens
    prefill: Callable[[], Any] | None = None  # prefills a prompt that cannot be split into chunks
    encoded_for: Callable[[Any], Any] | None = None  # model -> inputs of its cross-attention
    prompt_reader: PromptReader | None = None  # None: the prompt's logits are not needed
    may_draft: bool = True  # False: one token per step, whatever the policy plans
    has_callbacks: bool = (
        False  # choosing a token calls the user's processors, criteria or streamer
    )
    ends_with_others: bool = False  # a row of a batch that is returned when its last row ends
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    grammar: Grammar | None = None  # None: the output is unconstrained
    earlier: RequestMetrics | None = None  # of the request that this one continues after a pause
    value: int = 1  # of meeting its SLOs, within its priority, where not all can be guaranteed

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
        """SLOs that decode steps have to keep, in seconds: TPOT of all stages, and TTFT of all but
        the first.
        """
        slos_s = [stage.tpot_slo_s for stage in self.stages] + [
            stage.ttft_slo_s for stage in self.stages[1:]
        ]
        return [slo_s for slo_s in slos_s if slo_s is not None]
