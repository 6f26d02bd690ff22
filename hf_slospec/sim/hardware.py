"""What models cost on a machine: measured profiles, and published figures of large ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from hf_slospec.algo.latency import ForwardCost, LatencyCurve, StepCosts
from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.sim.files import parsed

MAX_TOKENS = 16384


@dataclass(frozen=True)
class Hardware:
    """Seconds of forwards of a target and a draft, and what a step costs beside them."""

    target: ForwardCost
    draft: ForwardCost  # one level, whatever its number of tokens
    mixed_s: float = 0.0  # what it costs that a step feeds prompts beside decoding
    host_s: float = 0.0  # of every step
    drafting_request_s: float = 0.0  # of every request of a step that drafts
    kv_tokens: int = 400_000  # tokens of K/V that fit

    def costs(self) -> StepCosts:
        """What policies are told, and then correct by what they see."""
        return StepCosts(self.target, self.draft)


def lines(*parts: tuple[float, float], per_request_ms: float = 0.0, per_key_ms: float = 0.0) -> ForwardCost:
    """The highest of some lines, milliseconds at no token and per token each, as a forward's cost."""
    places = {1, MAX_TOKENS, *(2**power for power in range(1, 15))}
    for at, (base, slope) in enumerate(parts):
        for other_base, other_slope in parts[at + 1 :]:
            if slope != other_slope:
                crossing = (base - other_base) / (other_slope - slope)
                places |= {math.floor(crossing), math.ceil(crossing)}
    tokens = sorted(place for place in places if 1 <= place <= MAX_TOKENS)
    seconds = tuple(max(base + slope * count for base, slope in parts) / 1e3 for count in tokens)
    return ForwardCost(LatencyCurve(tuple(tokens), seconds), per_request_ms / 1e3, per_key_ms / 1e3)


def curve(points: dict[int, float]) -> ForwardCost:
    """Milliseconds by tokens."""
    return ForwardCost(LatencyCurve(tuple(points), tuple(ms / 1e3 for ms in points.values())))


# Published figures; docs/simulator.md says whose they are and what they leave out.
HARDWARE: dict[str, Hardware] = {
    "llama-70b-4xh100": Hardware(lines((18.345, 0.064), per_key_ms=6.24e-5), lines((1.7, 0.004))),
    "llama-70b-4xa100": Hardware(
        lines((29.5, 0.12), (12.0, 0.205), per_key_ms=6.3e-5), lines((4.5, 0.004)), mixed_s=0.010
    ),
    "llama-8b-h100": Hardware(lines((6.939, 0.01844), per_key_ms=4.86e-5), lines((1.7, 0.004))),
    "llama-7b-h100": Hardware(curve({1: 5.6, 128: 6.4, 256: 9.2, 512: 12.1, 1024: 21.2}), lines((2.2, 0.002))),
    "llama-7b-a100": Hardware(
        curve({1: 9.3, 64: 9.8, 128: 12.3, 256: 17.9, 512: 33.6, 1024: 68.0}), lines((2.2, 0.003)), kv_tokens=80_000
    ),
    "opt-13b-a100": Hardware(
        lines((23.5, 0.0607), (22.1, 0.1405), per_key_ms=5.9e-4), lines((2.2, 0.003)), kv_tokens=55_000
    ),
}


class ForwardFile(BaseModel):
    """Milliseconds of a forward by its tokens."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[int] = Field(min_length=1)
    ms: list[FiniteFloat] = Field(min_length=1)
    ms_per_further_request: FiniteFloat = Field(0.0, ge=0)
    ms_per_1000_keys: FiniteFloat = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _is_a_curve(self) -> ForwardFile:
        if len(self.tokens) != len(self.ms):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.ms)} ms do not belong together")
        if self.tokens != sorted(set(self.tokens)) or self.tokens[0] < 1 or self.ms != sorted(self.ms):
            raise ValueError("tokens must rise from 1 or more, and ms must not fall")
        if self.ms[0] < 0:
            raise ValueError("ms must not be negative")
        return self

    def cost(self) -> ForwardCost:
        seconds = tuple(ms / 1e3 for ms in self.ms)
        per_request_s, per_key_s = self.ms_per_further_request / 1e3, self.ms_per_1000_keys / 1e6
        return ForwardCost(LatencyCurve(tuple(self.tokens), seconds), per_request_s, per_key_s)


class HardwareFile(BaseModel):
    """A latency file. What ``profile --json`` writes is one too."""

    model_config = ConfigDict(extra="forbid")

    target: ForwardFile
    draft: ForwardFile
    mixed_ms: FiniteFloat = Field(0.0, ge=0)
    host_ms: FiniteFloat = Field(0.0, ge=0)
    drafting_request_ms: FiniteFloat = Field(0.0, ge=0)
    kv_tokens: int = Field(400_000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _of_profile(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("results"), dict):
            fits = data["results"]
            return {name: fits[name].get("fit", {}) for name in ("target", "draft") if isinstance(fits.get(name), dict)}
        return data

    def hardware(self) -> Hardware:
        return Hardware(
            self.target.cost(),
            self.draft.cost(),
            self.mixed_ms / 1e3,
            self.host_ms / 1e3,
            self.drafting_request_ms / 1e3,
            self.kv_tokens,
        )


def hardware_of(name: str) -> Hardware:
    """One of :data:`HARDWARE`, or a latency file.

    Raises:
        InvalidFileError: with line and column.
        InvalidInputError: there is no such name or file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.exists():
        raise InvalidInputError(f"there is no file {name!r}, and known hardware is: {', '.join(HARDWARE)}")
    if path.is_dir():
        raise InvalidFileError(f"{path}: is a folder, not a latency file")
    return parsed(HardwareFile, path).hardware()
