"""Speed targets as callers write them: one for all rows, one per row, or several stages of a row."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from hf_slospec.engine.request import IsOver, Stage
from hf_slospec.errors import InvalidInputError, InvalidTypeError


class SLOStage(BaseModel):
    """A stretch of a row with its own target: the list ``[SLOStage(...), SLOStage(...)]`` is a target of several.

    For example thinking fast and answering at reading speed:
    ``[SLOStage(slo_tpot=0.01, until="</think>"), SLOStage(slo_tpot=0.05)]``. In a generation config that is saved,
    dicts with these fields do the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slo_tpot: float | None = Field(strict=True, description="Seconds per output token; None: no promise.")
    until: str | None = Field(None, min_length=1, description="The stage ends with the token that completes this text.")
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
    """One parsed target for all rows, or a list of them; raises InvalidInputError or InvalidTypeError."""
    if hasattr(slo_tpot, "tolist"):  # arrays and tensors
        slo_tpot = slo_tpot.tolist()
    if isinstance(slo_tpot, (list, tuple)) and not _is_stages(slo_tpot):
        return [_parsed(target) for target in slo_tpot]
    return _parsed(slo_tpot)


def _is_stages(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, (SLOStage, dict)) for v in value)


def _parsed(target: Any) -> _Parsed:
    if target is None:
        return None
    if _is_stages(target):
        try:
            stages = tuple(s if isinstance(s, SLOStage) else SLOStage.model_validate(s) for s in target)
        except ValidationError as error:
            raise InvalidInputError(f"slo_tpot has a stage that makes no sense: {error}") from error
        for stage in stages:
            _check_seconds(stage.slo_tpot)
        if any(stage.until is None and stage.tokens is None for stage in stages[:-1]):
            raise InvalidInputError("slo_tpot has a stage without an end before others; give it `until` or `tokens`")
        return stages
    _check_seconds(target)
    return target


def _check_seconds(tpot_slo_s: Any) -> None:
    if tpot_slo_s is None:
        return
    if isinstance(tpot_slo_s, bool) or not isinstance(tpot_slo_s, numbers.Real):
        raise InvalidTypeError(
            f"slo_tpot must be seconds per output token, None, a list of SLOStage, or a list of those per row; "
            f"got {tpot_slo_s!r}"
        )
    if not math.isfinite(tpot_slo_s) or tpot_slo_s <= 0:
        raise InvalidInputError(
            f"slo_tpot must be a positive, finite number of seconds per output token, got {tpot_slo_s!r}; "
            "use None for a row without a target"
        )


def slo_by_row(slo_tpot: _Parsed | list[_Parsed], num_rows: int, num_return_sequences: int) -> list[_Parsed]:
    """One target per row; a list may name the prompts (each stands for its returned sequences) or all rows."""
    if not isinstance(slo_tpot, list):
        return [slo_tpot] * num_rows
    if len(slo_tpot) * num_return_sequences == num_rows:
        return [target for target in slo_tpot for _ in range(num_return_sequences)]
    if len(slo_tpot) == num_rows:
        return slo_tpot
    raise InvalidInputError(
        f"slo_tpot has {len(slo_tpot)} entries for {num_rows} rows; give one number for all rows or one entry per row"
    )


def stages_of(target: _Parsed, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Stage, ...]:
    """A row's target as the engine knows it."""
    if not isinstance(target, tuple):
        return (Stage(target),)
    return tuple(
        Stage(s.slo_tpot, s.tokens) if s.until is None else Stage(s.slo_tpot, None, _completes(s.until, tokenizer))
        for s in target
    )


def _completes(text: str, tokenizer: PreTrainedTokenizerBase | None) -> IsOver:
    if tokenizer is None:
        raise InvalidInputError("slo_tpot has a stage with `until`, which needs a tokenizer; pass tokenizer=...")
    criterion = StopStringCriteria(tokenizer, [text])
    return lambda tokens: bool(criterion(torch.tensor([tokens]), None).all())
