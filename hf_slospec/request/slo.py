"""SLOs as callers pass them (one for all rows, one per row, or several stages of a row), and their
conversion to stages.
"""

from __future__ import annotations

import logging
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from hf_slospec.errors import InputModel, InvalidInputError, InvalidTypeError

logger = logging.getLogger(__name__)

# Takes the tokens so far; returns whether the output, or a stage of it, ends with the last one.
IsOver = Callable[[list[int]], bool]
LEAST_SLO_S = 1e-9  # shortest SLO in seconds; division by a shorter one may overflow
LONG_SLO_S = 5.0  # longer TPOT SLOs were probably meant as milliseconds


@dataclass(frozen=True)
class Stage:
    """Part of a request's output that has its own SLOs."""

    tpot_slo_s: float | None  # seconds per output token; None: no SLO
    num_tokens: int | None = None  # the stage ends after this many tokens; None: no limit
    is_over: IsOver = lambda tokens: False  # the stage also ends if this returns True
    # Seconds from the end of the stage before to this stage's first token; if it is set, TPOT
    # counts from that token on. In the first stage, the request's TTFT SLO is used instead.
    ttft_slo_s: float | None = None


class SLOStage(InputModel):
    """Part of a row's output with its own SLOs; a list of stages is the SLO of one row.

    For example, to think fast and answer at reading speed: ``[SLOStage(slo_tpot=0.01,
    until="</think>"), SLOStage(slo_tpot=0.05)]``. In a generation config that is saved, use dicts
    with these fields.
    """

    slo_tpot: float | None = Field(
        strict=True, description="Seconds per output token; None: no SLO."
    )
    slo_ttft: float | None = Field(
        None,
        strict=True,
        description="Seconds to its first token, from the end of the stage before, or from arrival.",
    )
    until: Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)] | None = (
        Field(
            None,
            description="The stage ends with the token that completes this text, or with the token of this id.",
        )
    )
    tokens: int | None = Field(None, ge=1, description="The stage ends after this many tokens.")

    @model_validator(mode="after")
    def _ends_one_way(self) -> SLOStage:
        if self.until is not None and self.tokens is not None:
            raise ValueError("a stage ends by `until` or by `tokens`, not by both")
        return self


RowSLO = float | Sequence[SLOStage | dict[str, Any]] | None
SLOTpot = RowSLO | Sequence[RowSLO]
Stages = tuple[Stage, ...]  # all stages of one row
# Takes a stage's `until` text; returns a function that tells whether the tokens so far end the
# stage.
EndsWith = Callable[[str], IsOver]


def parse_slo(
    slo_tpot: Any, ends_with: EndsWith | None = None, warns: bool = True
) -> Stages | list[Stages]:
    """Return the stages that ``slo_tpot`` describes.

    Args:
        slo_tpot: the argument of ``generate`` or ``submit``.
        ends_with: makes the test for the end of a stage from its ``until`` text; raises ValueError
            for texts that no output can contain. None: there is no tokenizer.
        warns: log a warning if milliseconds were probably meant.

    Returns:
        The stages of all rows, or a list with the stages of each row or prompt.

    Raises:
        InvalidInputError, InvalidTypeError: ``slo_tpot`` is not an SLO, or a stage has ``until``
            and there is no tokenizer.
    """
    if hasattr(slo_tpot, "tolist"):  # numpy arrays and tensors
        try:
            slo_tpot = slo_tpot.tolist()
        except (NotImplementedError, RuntimeError) as error:  # e.g. a tensor on the meta device
            raise InvalidInputError(
                f"slo_tpot has no values that can be read; pass numbers: {error}"
            ) from error
    is_per_row = isinstance(slo_tpot, (list, tuple)) and not _is_stages(slo_tpot)
    rows = [_parsed(row_slo, ends_with) for row_slo in (slo_tpot if is_per_row else [slo_tpot])]
    slos_s = [float(stage.tpot_slo_s or 0.0) for stages in rows for stage in stages]
    if warns and (longest_s := max(slos_s, default=0.0)) > LONG_SLO_S:
        logger.warning(
            "slo_tpot=%g means %g seconds per output token; for %g milliseconds, pass %g",
            *(longest_s, longest_s, longest_s, longest_s / 1e3),
        )
    return rows if is_per_row else rows[0]


def _is_stages(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(v, (SLOStage, dict)) for v in value)
    )


def _parsed(slo: Any, ends_with: EndsWith | None) -> Stages:
    if not _is_stages(slo):
        _check_seconds(slo)
        return (Stage(slo),)
    try:
        stages = [
            s if isinstance(s, SLOStage) else SLOStage(**{str(k): v for k, v in s.items()})
            for s in slo
        ]
    except InvalidInputError as error:
        raise InvalidInputError(f"slo_tpot has an invalid stage: {error}") from error
    for stage in stages:
        _check_seconds(stage.slo_tpot)
        _check_seconds(stage.slo_ttft, "slo_ttft of a stage", "seconds")
    if any(stage.until is None and stage.tokens is None for stage in stages[:-1]):
        raise InvalidInputError(
            "slo_tpot has a stage without an end that is not the last; give it `until` or `tokens`"
        )
    return tuple(
        Stage(s.slo_tpot, s.tokens, _is_over(s.until, ends_with), s.slo_ttft) for s in stages
    )


def _is_over(until: str | int | None, ends_with: EndsWith | None) -> IsOver:
    if not isinstance(until, str):
        return lambda tokens: tokens[-1] == until
    if ends_with is None:
        raise InvalidInputError(
            "slo_tpot has a stage with `until`, which needs a tokenizer; pass tokenizer=..."
        )
    try:
        return ends_with(until)
    except ValueError as error:
        raise InvalidInputError(
            f"slo_tpot has a stage whose `until` {until!r} cannot occur: {error}"
        ) from error


def _check_seconds(
    seconds: Any, name: str = "slo_tpot", unit: str = "seconds per output token"
) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise InvalidTypeError(
            f"{name} must be {unit}, None, a list of SLOStage, or a list of those per row; got {seconds!r}"
        )
    number: Any = seconds  # typed as Any, since numbers.Real declares no comparison with floats
    if not LEAST_SLO_S <= number <= sys.float_info.max:
        raise InvalidInputError(
            f"{name} must be a positive, finite number of {unit} (at least {LEAST_SLO_S:g}), "
            f"got {seconds!r}; use None for a row without an SLO"
        )
