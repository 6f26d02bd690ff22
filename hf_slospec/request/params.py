"""``SubmitOptions``, which validates the options of ``submit``, and ``RequestParams``, the
parameters of a :class:`Request`. Prompts are converted in ``batcher/submission.py``.
"""

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

# Error type of values of the right type that contradict themselves or other options.
IMPOSSIBLE = "impossible"
# Prefixes of the pydantic error types that concern values; all other ones concern types.
VALUE_ERRORS = ("greater_than", "less_than", "finite", IMPOSSIBLE)
# Largest value of a request. Bounded, as admission's dynamic program enumerates sums of values.
MAX_VALUE = 100


class Noise(Protocol):
    """Noise with which the target will choose a sampled request's tokens, for drafters that rank
    their proposals by it.
    """

    def after(self, depth: int, tokens: Sequence[int] | None = None) -> Any:
        """Return the noise of the token after a draft node at this depth (root: 0): of all tokens,
        or of those that are given.

        The noise is Exp(1): the target takes the token with the highest ``probability / noise``.
        Let the target choose a token with probability p; once the token's noise q is known, that
        probability is exp(-q (1 - p) / p).

        Returns:
            [vocab] or [number of tokens] f32 tensor; infinite for tokens that the target cannot
            choose.
        """


class Grammar(Protocol):
    """Constraint on a request's output, which its draft trees follow as well.

    ``token_ids`` are new tokens of the output, followed by draft tokens.
    """

    def allows(self, token_ids: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """Return one flag per proposed token: True if it may follow ``token_ids``."""

    def expected(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return likely continuations of ``token_ids``, where the grammar leaves few choices."""

    def masked(self, token_ids: Sequence[Sequence[int]], scores: Any) -> Any:
        """Set the draft scores of tokens that may not follow to -inf.

        Args:
            token_ids: per node, the tokens up to and including it.
            scores: [num_nodes, vocab].

        Returns:
            [num_nodes, vocab].
        """


class PromptReader(Protocol):
    """Receives the logits of a prompt's positions while the target prefills it."""

    logprobs: list[Any]  # log probabilities of the prompt tokens so far; None for the first token

    @property
    def num_read(self) -> int:
        """Number of prompt tokens whose next-token logits have been received so far."""

    def take(self, logits: Any) -> None:
        """Take the logits of the next positions, [num_tokens, vocab] in the model's dtype."""


class SubmitOptions(BaseModel):
    """Options of ``submit`` that ``generate`` does not have. With the defaults, a request is
    decoded as ``generate`` decodes it.
    """

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
    logprobs: int | None = Field(None, ge=0)  # number of most probable tokens per new token
    processed_logprobs: bool = False  # logprobs are those after logits processors
    # logprobs are those of the logits divided by this, whatever other processors do
    logprobs_temperature: float | None = Field(None, gt=0)
    prompt_logprobs: int | None = Field(
        None, ge=0
    )  # number of most probable tokens per prompt token

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
        """Validate options.

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
    """Prompt and options of a request. They are complete before the :class:`Request` is created and
    do not change while it is decoded.

    ``generate.prepare`` creates them, for ``generate`` and ``submit`` alike.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stages: tuple[Stage, ...] = (Stage(None),)
    ttft_slo_s: float | None = None  # seconds from arrival to the first token
    priority: int = 0  # requests with lower numbers are served first
    is_best_effort: bool = False  # give no guarantee
    must_guarantee: bool = False  # refuse the request unless its SLOs are guaranteed on arrival
    cache_salt: str = ""  # cached K/V is shared only between requests with the same salt
    is_sampled: bool = False
    row: int = 0  # row of the request in the batch of its `generate` call
    num_padding: int = 0  # left padding of the prompt in that batch, in tokens
    # Called after every token with prompt and output; True ends the request.
    is_stop: IsOver = lambda tokens: False
    # Prefills a prompt that cannot be split into chunks, e.g. with images; None: it can be split.
    prefill: Callable[[], Any] | None = None
    # Takes a model, returns the encoder inputs of its cross-attention; None: decoder-only.
    encoded_for: Callable[[Any], Any] | None = None
    is_text: bool = True  # the model reads the tokens of the prompt, and nothing else
    prompt_reader: PromptReader | None = None  # None: the prompt's logits are not needed
    may_draft: bool = True  # False: decode one token per step, whatever the policy plans
    # Choosing a token calls logits processors, stopping criteria or a streamer of the user.
    has_callbacks: bool = False
    ends_with_others: bool = False  # row of a batch that is returned when its last row ends
    are_all_running: Callable[[], bool] = lambda: True  # no row of that batch waits for its turn
    e2e_slo_s: float | None = None  # seconds from arrival to the last token
    grammar: Grammar | None = None  # None: the output is unconstrained
    # Metrics of the request that this one continues after a pause; None: it continues none.
    earlier: RequestMetrics | None = None
    # How much it is worth to meet the SLOs, compared with requests of the same priority.
    value: int = 1

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def has_slo(self) -> bool:
        """Return whether the request has a TTFT SLO, an E2E SLO, or an SLO of any stage."""
        return self.ttft_slo_s is not None or self.e2e_slo_s is not None or bool(self.stage_slos_s)

    @property
    def stage_slos_s(self) -> list[float]:
        """SLOs that limit the seconds of decode steps: the TPOT SLOs of all stages, and the TTFT
        SLOs of all stages but the first.
        """
        slos_s = [stage.tpot_slo_s for stage in self.stages] + [
            stage.ttft_slo_s for stage in self.stages[1:]
        ]
        return [slo_s for slo_s in slos_s if slo_s is not None]
