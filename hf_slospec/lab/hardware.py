"""Latencies of a target and a draft on a machine: from files that ``hf_slospec profile`` writes, or
published figures of large models.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AliasPath, BaseModel, ConfigDict, Field, model_validator

from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.lab.files import read_json, validated

MAX_TOKENS = 16384


@dataclass(frozen=True)
class Hardware:
    """Latencies of a target and a draft, and the further costs of a step."""

    target: ForwardCost
    draft: ForwardCost  # forward of one tree level
    mixed_s: float = 0.0  # added to a step that both prefills and decodes
    host_s: float = 0.0  # added to every step
    drafting_request_s: float = 0.0  # added per request that is drafted for
    kv_tokens: int = 400_000  # capacity of the K/V cache

    def costs(self) -> StepCosts:
        """Return the initial step costs, which measured steps correct."""
        return StepCosts(self.target, self.draft)


def lines(
    *parts: tuple[float, float], per_request_ms: float = 0.0, per_key_ms: float = 0.0
) -> ForwardCost:
    """Return a forward cost that is the maximum of straight lines, each given as (milliseconds at 0
    tokens, milliseconds per token).
    """
    knots = {1, MAX_TOKENS, *(2**power for power in range(1, 15))}
    for index, (base, slope) in enumerate(parts):
        for other_base, other_slope in parts[index + 1 :]:
            if slope != other_slope:
                crossing = (base - other_base) / (other_slope - slope)
                knots |= {math.floor(crossing), math.ceil(crossing)}
    tokens = sorted(knot for knot in knots if 1 <= knot <= MAX_TOKENS)
    seconds = tuple(max(base + slope * count for base, slope in parts) / 1e3 for count in tokens)
    return ForwardCost(LatencyCurve(tuple(tokens), seconds), per_request_ms / 1e3, per_key_ms / 1e3)


def curve(points: dict[int, float]) -> ForwardCost:
    """Return a forward cost from points: number of tokens -> milliseconds."""
    return ForwardCost(LatencyCurve(tuple(points), tuple(ms / 1e3 for ms in points.values())))


# Published figures; docs/simulator.md has their sources and limits.
HARDWARE: dict[str, Hardware] = {
    "llama-70b-4xh100": Hardware(lines((18.345, 0.064), per_key_ms=6.24e-5), lines((1.7, 0.004))),
    "llama-70b-4xa100": Hardware(
        lines((29.5, 0.12), (12.0, 0.205), per_key_ms=6.3e-5), lines((4.5, 0.004)), mixed_s=0.010
    ),
    "llama-8b-h100": Hardware(lines((6.939, 0.01844), per_key_ms=4.86e-5), lines((1.7, 0.004))),
    "llama-7b-h100": Hardware(
        curve({1: 5.6, 128: 6.4, 256: 9.2, 512: 12.1, 1024: 21.2}), lines((2.2, 0.002))
    ),
    "llama-7b-a100": Hardware(
        curve({1: 9.3, 64: 9.8, 128: 12.3, 256: 17.9, 512: 33.6, 1024: 68.0}),
        lines((2.2, 0.003)),
        kv_tokens=80_000,
    ),
    "opt-13b-a100": Hardware(
        lines((23.5, 0.0607), (22.1, 0.1405), per_key_ms=5.9e-4),
        lines((2.2, 0.003)),
        kv_tokens=55_000,
    ),
}


MIN_TARGET_MS = 0.01  # above 0, as every step must advance the virtual clock
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class ForwardFile(BaseModel):
    """The forwards of one model in a latency file: milliseconds by number of tokens."""

    model_config = ConfigDict(extra="forbid")

    tokens: list[Count] = Field(min_length=1)
    ms: list[Milliseconds] = Field(min_length=1)
    ms_per_further_request: Milliseconds = 0.0
    ms_per_1000_keys: Milliseconds = 0.0

    @model_validator(mode="after")
    def _check_curve(self) -> ForwardFile:
        if len(self.tokens) != len(self.ms):
            raise ValueError(
                f"tokens and ms must have equal lengths, got {len(self.tokens)} and {len(self.ms)}"
            )
        if self.tokens != sorted(set(self.tokens)) or self.ms != sorted(self.ms):
            raise ValueError("tokens must increase, and ms must not decrease")
        return self

    def cost(self) -> ForwardCost:
        """Return the same latencies in seconds."""
        seconds = tuple(ms / 1e3 for ms in self.ms)
        per_request_s = self.ms_per_further_request / 1e3
        per_key_s = self.ms_per_1000_keys / 1e6
        return ForwardCost(LatencyCurve(tuple(self.tokens), seconds), per_request_s, per_key_s)


def _lasting(cost: ForwardFile) -> ForwardFile:
    if cost.ms[0] < MIN_TARGET_MS:
        raise ValueError(
            f"a forward of the target takes at least {MIN_TARGET_MS} ms, got {cost.ms[0]}"
        )
    return cost


TargetFile = Annotated[ForwardFile, AfterValidator(_lasting)]


class HardwareFile(BaseModel):
    """Content of a latency file: forwards of both models, and the further costs of a step."""

    model_config = ConfigDict(extra="forbid")

    target: TargetFile
    draft: ForwardFile
    mixed_ms: Milliseconds = 0.0
    host_ms: Milliseconds = 0.0
    drafting_request_ms: Milliseconds = 0.0
    kv_tokens: Count = 400_000

    def hardware(self) -> Hardware:
        """Return the latencies in seconds."""
        return Hardware(
            self.target.cost(),
            self.draft.cost(),
            self.mixed_ms / 1e3,
            self.host_ms / 1e3,
            self.drafting_request_ms / 1e3,
            self.kv_tokens,
        )


class ProfileFile(BaseModel):
    """Content of a file that ``profile --json`` writes; keys besides the fits are ignored."""

    target: TargetFile = Field(validation_alias=AliasPath("results", "target", "fit"))
    draft: ForwardFile = Field(validation_alias=AliasPath("results", "draft", "fit"))

    def hardware(self) -> Hardware:
        """Return the latencies in seconds; further costs of a step are 0."""
        return Hardware(self.target.cost(), self.draft.cost())


def hardware_of(name: str) -> Hardware:
    """Return one of :data:`HARDWARE`, or the content of a latency file or of a file that
    ``profile --json`` wrote.

    Raises:
        InvalidFileError: the file is invalid; the message has line and column.
        InvalidInputError: there is no such name or file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if not os.path.exists(name):
        raise InvalidInputError(
            f"there is no file {name!r}, and known hardware is: {', '.join(HARDWARE)}"
        )
    path = Path(name)
    if path.is_dir():
        raise InvalidFileError(
            f"{path}: is a folder, not a latency file; give the path of the file"
        )
    text, data = read_json(path)
    is_profile = isinstance(data, dict) and "results" in data
    model: type[ProfileFile | HardwareFile] = ProfileFile if is_profile else HardwareFile
    return validated(model, path, text, data).hardware()
