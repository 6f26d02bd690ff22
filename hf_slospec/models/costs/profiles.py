"""Profiles of models on this machine, saved in the user's cache directory."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hf_slospec.algo.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.models.device.machine import digest, kept_file, machine, write_atomically
from hf_slospec.models.inspection.properties import config_values
from hf_slospec.models.packed.model import PackedModel

MAX_S = 1e4  # maximum seconds of a forward in a profile
MAX_TOKENS = 2**20  # maximum number of tokens of a forward
VERSION = 5  # changes with the file format and the measured sizes


class Profile(BaseModel):
    """Measured costs of one model's packed forwards on one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    of: dict[str, Any]  # the model and machine that it is valid for; see `identity`
    num_tokens: tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], ...]
    seconds: tuple[Annotated[float, Field(gt=0, le=MAX_S)], ...]
    per_request_s: Annotated[float, Field(ge=0, le=MAX_S)]
    per_key_s: Annotated[float, Field(ge=0, le=MAX_S)]

    @model_validator(mode="after")
    def _is_a_curve(self) -> Profile:
        if len(self.num_tokens) != len(self.seconds) or not self.num_tokens:
            raise ValueError("num_tokens and seconds must be equally long and not empty")
        if list(self.num_tokens) != sorted(set(self.num_tokens)) or list(self.seconds) != sorted(self.seconds):
            raise ValueError("num_tokens must rise, and seconds must not fall")
        return self

    @classmethod
    def from_cost(cls, cost: ForwardCost, identity: dict[str, Any]) -> Profile:
        """Return the profile of a cost, for the model and machine described by ``identity``."""
        return cls(
            of=identity,
            num_tokens=cost.curve.num_tokens,
            seconds=cost.curve.seconds,
            per_request_s=cost.per_request_s,
            per_key_s=cost.per_key_s,
        )

    def cost(self) -> ForwardCost:
        """Return the profiled cost."""
        return ForwardCost(LatencyCurve(self.num_tokens, self.seconds), self.per_request_s, self.per_key_s)


def identity(packed: PackedModel) -> dict[str, Any]:
    """Return what costs depend on: the model, the settings of its packed forwards and the machine."""
    model = packed.model
    modules = Counter(type(module).__qualname__ for module in model.modules())  # adapters, quantised linears
    return {
        "class": type(model).__name__,
        "config": digest(config_values(model.config)),
        "modules": digest(sorted(modules.items())),
        "dtype": str(model.get_input_embeddings().weight.dtype),
        "attention": packed.backend.__name__,
        "kernels": packed.prepacked.kernels,
        "graphs": packed.captured.is_on,
        "compiled": packed.compiled.is_used,
        "ranks": packed.ranks.number,
        **({} if packed.exact is None else {"exact": packed.exact}),
        **({} if packed.autocast is None else {"autocast": str(packed.autocast)}),
        **machine(packed.device),
    }


def load_profile(packed: PackedModel) -> ForwardCost | None:
    """Return the saved cost of this model on this machine; an invalid file is deleted with a warning."""
    try:
        path = _path(packed)
        profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        warnings.warn(f"{path} is not a profile ({type(error).__name__}); the model is measured again", stacklevel=2)
        path.unlink(missing_ok=True)
        return None
    except (OSError, ValueError):
        return None  # the directory cannot be used; save_profile warns of it
    return profile.cost() if profile.version == VERSION and profile.of == identity(packed) else None


def save_profile(packed: PackedModel, cost: ForwardCost) -> None:
    """Save a cost; warn if the cache directory cannot be written to."""
    try:
        path = _path(packed)
        write_atomically(path, Profile.from_cost(cost, identity(packed)).model_dump_json(indent=1))
    except (OSError, ValueError) as error:
        warnings.warn(f"the profile could not be saved ({error}); the model is measured again next time", stacklevel=2)


def drop_profile(packed: PackedModel) -> None:
    """Remove the saved cost, so that the next process measures the model again."""
    with contextlib.suppress(OSError, ValueError):  # a directory that cannot be used holds no profile
        _path(packed).unlink(missing_ok=True)


def _path(packed: PackedModel) -> Path:
    return kept_file("profiles", type(packed.model).__name__, identity(packed))
