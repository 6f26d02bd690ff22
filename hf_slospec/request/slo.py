"""SLOs as callers write them: one for all rows, one per row, or several stages of a row."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hf_slospec.errors import InvalidInputError, InvalidTypeError
from hf_slospec.request.request import LEAST_SLO_S, IsOver, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SLOStage(BaseModel):
    """A part of a row's output with its own SLOs; a list of stages is the SLO of one row.

    For example thinking fast and answering at reading speed:
    ``[SLOStage(slo_tpot=0.01, until="</think>"), SLOStage(slo_tpot=0.05)]``. In a generation config
    that is saved, dicts with these fields do the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
_Parsed = float | None | tuple[SLOStage, ...]


def parse_slo(slo_tpot: Any) -> _Parsed | list[_Parsed]:
    """Return one parsed SLO for all rows, or a list of them.

    Raises:
        InvalidInputError, InvalidTypeError: the argument is not an SLO.
    """
    if hasattr(slo_tpot, "tolist"):  # arrays and tensors
        try:
            slo_tpot = slo_tpot.tolist()
        except (NotImplementedError, RuntimeError) as error:  # a tensor without data
            raise InvalidInputError(
                f"slo_tpot has no values that can be read; pass numbers: {error}"
            ) from error
    if isinstance(slo_tpot, (list, tuple)) and not _is_stages(slo_tpot):
        return [_parsed(row_slo) for row_slo in slo_tpot]
    return _parsed(slo_tpot)


def _is_stages(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(v, (SLOStage, dict)) for v in value)
    )


def _parsed(slo: Any) -> _Parsed:
    if not _is_stages(slo):
        _check_seconds(slo)
        seconds: float | None = slo
        return seconds
    try:
        stages = tuple(s if isinstance(s, SLOStage) else SLOStage.model_validate(s) for s in slo)
    except ValidationError as error:
        raise InvalidInputError(f"slo_tpot has an invalid stage: {error}") from error
    for stage in stages:
        _check_seconds(stage.slo_tpot)
        _check_seconds(stage.slo_ttft, "slo_ttft of a stage", "seconds")
    if any(stage.until is None and stage.tokens is None for stage in stages[:-1]):
        raise InvalidInputError(
            "slo_tpot has a stage without an end that is not the last; give it `until` or `tokens`"
        )
    return stages


def _check_seconds(
    seconds: Any, name: str = "slo_tpot", unit: str = "seconds per output token"
) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise InvalidTypeError(
            f"{name} must be {unit}, None, a list of SLOStage, or a list of those per row; got {seconds!r}"
        )
    number: Any = seconds  # numbers.Real declares no comparison with floats
    if not LEAST_SLO_S <= number <= sys.float_info.max:
        raise InvalidInputError(
            f"{name} must be a positive, finite number of {unit} (at least {LEAST_SLO_S:g}), "
            f"got {seconds!r}; use None for a row without an SLO"
        )


def stages_by_row(
    slo: _Parsed | list[_Parsed],
    num_rows: int,
    num_return_sequences: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[tuple[Stage, ...]]:
    """Return every row's stages; a list may hold one SLO per prompt (for all its returned
    sequences) or per row.

    Raises:
        InvalidInputError: the list has another length, or a stage's `until` lacks a tokenizer.
    """
    if not isinstance(slo, list):
        return [_stages(slo, tokenizer)] * num_rows
    if len(slo) * num_return_sequences == num_rows:
        slo = [prompt_slo for prompt_slo in slo for _ in range(num_return_sequences)]
    if len(slo) != num_rows:
        raise InvalidInputError(
            f"slo_tpot has {len(slo)} entries for {num_rows} rows; give one number for all rows or one entry per row"
        )
    return [_stages(row_slo, tokenizer) for row_slo in slo]


def _stages(slo: _Parsed, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Stage, ...]:
    if not isinstance(slo, tuple):
        return (Stage(slo),)
    return tuple(Stage(s.slo_tpot, s.tokens, _is_over(s.until, tokenizer), s.slo_ttft) for s in slo)


def _is_over(until: str | int | None, tokenizer: PreTrainedTokenizerBase | None) -> IsOver:
    """Return the function that says whether a text or token id ends a stage with the last of a
    request's tokens.
    """
    if until is None or isinstance(until, int):
        return lambda tokens: tokens[-1] == until
    if tokenizer is None:
        raise InvalidInputError(
            "slo_tpot has a stage with `until`, which needs a tokenizer; pass tokenizer=..."
        )
    from hf_slospec.generate.rows import (
        StopStrings,  # loads torch, which a server's options do without
    )

    try:
        return StopStrings(tokenizer, until).ends
    except ValueError as error:
        raise InvalidInputError(
            f"slo_tpot has a stage whose `until` {until!r} cannot occur: {error}"
        ) from error
