"""Measurement of how many seconds packed forwards take, by number of tokens, requests and cached
tokens; the results are saved as profiles.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.model.batch import MAX_DENSE, CachedSequence, Encoded
from hf_slospec.model.machine import digest, kept_file, machine, write_atomically
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import config_values
from hf_slospec.model.transfer import apart_from_captures, synchronize
from hf_slospec.model.tree_mask import chain
from hf_slospec.model.trial import random_tokens

KEYS = 128  # cached tokens per measured sequence, unless the size says otherwise


@dataclass(frozen=True, order=True)
class Size:
    """Size of a forward: new tokens, requests that they are divided among, and cached tokens that
    each request attends to.
    """

    num_tokens: int
    num_requests: int = 1
    keys_each: int = KEYS

    @property
    def num_keys(self) -> int:
        """Number of cached tokens of all requests together."""
        return self.num_requests * self.keys_each

    @property
    def amounts(self) -> tuple[int, int, int]:
        """The size as arguments of :class:`ForwardCost`."""
        return self.num_tokens, self.num_requests, self.num_keys


# Measured sizes of the cost curve, most important first. The first two are always measured, as a
# curve needs a slope. A large size is skipped if half as many tokens take at least WORTHWHILE times
# as long as one token. Large sizes have several requests, as steps do: a long chain of one request
# is a prefill chunk, which is not captured in CUDA graphs. Kernels process blocks of rows, so the
# sizes after 16 and 32 can take much longer than interpolation would say (a quarter on a CPU).
CURVE = tuple(
    Size(tokens, -(-tokens // MAX_DENSE))
    for tokens in (1, 4, 16, 64, 6, 32, 18, 8, 2, 36, 128, 256, 512)
)
NEEDED = CURVE[:2]  # sizes that are always measured
# Sizes with more requests than the curve's size of 16 tokens, and with more cached tokens, too: they
# give the cost per request and per cached token. A key costs more the more tokens of its request
# attend to it; four are between plain decoding and large trees.
SLOPES = (Size(16, 4), Size(16, 4, 3 * KEYS))
# Sizes that the fit does not use, to evaluate its errors.
HELD_OUT = (Size(3), Size(12, 4), Size(24, 8), Size(48, 2, 512), Size(96, 2))
WORTHWHILE = 4.0  # factor on the seconds of one token, see CURVE
# Upper bound of the cost of one more request, as a share of the seconds of 16 tokens.
MAX_PER_REQUEST = 0.1
# Lower bound of the share of a forward's seconds that is attributed to its tokens, as a pause
# during measuring may inflate the costs per request and per cached token.
LEAST = 0.1
REPEATS = 4  # rounds of measuring
MAX_DIFFERENT = 512  # different tokens in a measured forward


@dataclass
class Measured:
    """Fastest time of each size; the minimum, because other load on the machine can only add
    time.
    """

    seconds: dict[Size, float] = field(default_factory=dict)

    def add(self, size: Size, seconds: float) -> None:
        """Record the seconds of a forward if it is the fastest of its size."""
        self.seconds[size] = min(seconds, self.seconds.get(size, seconds))

    def fit(self) -> ForwardCost:
        """Fit a cost: a monotone curve in tokens, with linear terms for further requests and for
        cached tokens.

        The linear terms are bounded, as a pause during one of the few forwards that they are
        computed from would distort them.
        """
        at_16, many, long = (self.seconds.get(size) for size in (Size(16), *SLOPES))
        per_key_s = 0.0
        per_request_s = 0.0
        if many is not None and long is not None:
            num_more = SLOPES[1].num_keys - SLOPES[0].num_keys
            per_key_s = min(max(long - many, 0.0), many) / num_more
        if at_16 is not None and many is not None:
            extra_s = many - at_16 - per_key_s * (SLOPES[0].num_keys - KEYS)
            per_request_s = min(
                max(extra_s, 0.0) / (SLOPES[0].num_requests - 1), MAX_PER_REQUEST * at_16
            )
        points = {
            size.num_tokens: max(
                s - per_key_s * size.num_keys - per_request_s * (size.num_requests - 1), LEAST * s
            )
            for size, s in self.seconds.items()
            if size in CURVE
        }
        return ForwardCost(
            LatencyCurve.fit(list(points), list(points.values())), per_request_s, per_key_s
        )

    def errors(self, cost: ForwardCost) -> dict[Size, float]:
        """Return the relative errors of a cost at the held-out sizes; positive if it predicts too
        much.
        """
        held_out = {size: self.seconds[size] for size in HELD_OUT if size in self.seconds}
        return {size: float(cost(*size.amounts)) / s - 1.0 for size, s in held_out.items()}


class Timer(Protocol):
    """Interface that times forwards by size."""

    def __call__(self, size: Size) -> float:
        """Run a forward of this size, and return its seconds."""

    def clock(self) -> float:
        """Return monotonic seconds."""


def measure(
    forward_s: Timer,
    limit_s: float,
    held_out: bool = False,
    repeats: int = REPEATS,
) -> Measured:
    """Time forwards of many sizes, in rounds, for about ``limit_s`` seconds.

    A forward that is expected to end after the limit is skipped, so a slow model is measured at
    fewer sizes. The caller must hold the model's lock.

    Args:
        forward_s: times one forward.
        limit_s: seconds.
        held_out: measure :data:`HELD_OUT`, too.
        repeats: maximum number of rounds.
    """
    measured = Measured()
    sizes = [*CURVE[:4], *SLOPES, *CURVE[4:], *(HELD_OUT if held_out else ())]
    forward_s(Size(1))  # not recorded, as the first forward has one-off costs
    started_s = forward_s.clock()
    for repeat in range(repeats):
        for size in sizes:
            is_needed = repeat == 0 and size in NEEDED
            left_s = limit_s - (forward_s.clock() - started_s)
            if is_needed or (
                measured.fit()(*size.amounts) < left_s and _is_worthwhile(size, measured)
            ):
                measured.add(size, forward_s(size))
    return measured


def _is_worthwhile(size: Size, measured: Measured) -> bool:
    """Return whether steps of this size may be worthwhile: half as many tokens take little longer
    than one token.
    """
    smaller = [
        known
        for known in CURVE
        if known in measured.seconds and 2 * known.num_tokens <= size.num_tokens
    ]
    return (
        size.num_tokens <= 64
        or measured.seconds[max(smaller)] < WORTHWHILE * measured.seconds[Size(1)]
    )


class Forwards:
    """Timer of a model's packed forwards. Each forward reserves K/V slots while it runs."""

    def __init__(self, packed: PackedModel):
        self.packed = packed
        self.clock = packed.ranks.clock
        self._cache = packed.kv_cache
        self._token_ids = random_tokens(packed, 0, MAX_DIFFERENT)
        self._encoded: Encoded | None = None
        if packed.family.attends_to_encoder:
            config = packed.model.config.get_text_config()
            length = getattr(config, "max_source_positions", KEYS)
            weight = packed.model.get_input_embeddings().weight
            (self._encoded,), _ = packed.family.encode(
                packed.model, weight.new_zeros(1, length, config.hidden_size)
            )

    def __call__(self, size: Size) -> float:
        """Run a forward of this size, and return its seconds; if forwards are captured in CUDA
        graphs, the seconds of a replay.
        """
        bounds = [size.num_tokens * i // size.num_requests for i in range(size.num_requests + 1)]
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        with self._cache.temporary([size.keys_each + length for length in lengths]) as sequences:
            for sequence in sequences:
                sequence.length = size.keys_each
                sequence.encoded = self._encoded
                sequence.states = self.packed.family.new_states(size.keys_each)
            with contextlib.ExitStack() as stack:
                for path in self.packed.paths:
                    stack.enter_context(path.measuring(self._cache.pool))
                num_one_off = self.packed.num_one_off_forwards
                seconds = self._forward(sequences, lengths)
                if self.packed.num_one_off_forwards == num_one_off:
                    return seconds
                return self._forward(sequences, lengths)

    def token_ids(self, number: int) -> list[int]:
        """Return the tokens of a measured forward: different ones, as a mixture of experts routes
        equal tokens to the same experts and would take less time than a step.
        """
        return list(itertools.islice(itertools.cycle(self._token_ids), number))

    def _forward(self, sequences: list[CachedSequence], lengths: list[int]) -> float:
        with apart_from_captures(self.packed.device):
            begun_s = self.clock()
            pairs = zip(sequences, lengths, strict=True)
            tokens = iter(self.token_ids(sum(lengths)))
            parts = [
                chain(self.packed, sequence, list(itertools.islice(tokens, length)))
                for sequence, length in pairs
            ]
            self.packed.forward(self._cache.pool, parts, torch.arange(sum(lengths), device="cpu"))
            synchronize(self.packed.device)
            return self.clock() - begun_s


MAX_S = 1e4  # maximum seconds of a forward in a valid profile
MAX_TOKENS = 2**20  # maximum number of tokens of a forward in a valid profile
VERSION = 8  # file version of profiles; increase it if the file format or the measured sizes change


class Profile(BaseModel):
    """Measured costs of one model's packed forwards on one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of: dict[str, Any]  # model, settings and machine that it is valid for; see `identity`
    cost: ForwardCost

    @model_validator(mode="after")
    def _is_a_cost(self) -> Profile:
        sizes = self.cost.curve.num_tokens
        seconds = self.cost.curve.seconds
        numbers = *seconds, self.cost.per_request_s, self.cost.per_key_s
        rises = list(sizes) == sorted(set(sizes)) and list(seconds) == sorted(seconds)
        if (
            not rises
            or len(sizes) != len(seconds)
            or not 1 <= min(sizes) <= max(sizes) <= MAX_TOKENS
        ):
            raise ValueError("num_tokens must rise, and seconds not fall, in as many points")
        if not (seconds[0] > 0 and all(0 <= number <= MAX_S for number in numbers)):
            raise ValueError("seconds must be in range")
        return self


def identity(packed: PackedModel) -> dict[str, Any]:
    """Return what costs depend on: the model, the settings of its packed forwards, and the
    machine.
    """
    model = packed.model
    # Counts of module classes distinguish models with adapters or quantised layers.
    modules = Counter(type(module).__qualname__ for module in model.modules())
    return {
        "version": VERSION,
        "class": type(model).__name__,
        "config": digest(config_values(model.config)),
        "modules": digest(sorted(modules.items())),
        "dtype": str(model.get_input_embeddings().weight.dtype),
        "attention": packed.backend.__name__,
        "kernels": packed.overrides.kernels,
        "paths": [path.name for path in packed.paths if path.is_ready],
        "ranks": packed.ranks.number,
        **({} if packed.exact is None else {"exact": packed.exact}),
        **({} if packed.autocast is None else {"autocast": str(packed.autocast)}),
        **machine(packed.device),
    }


def load_profile(packed: PackedModel) -> ForwardCost | None:
    """Return the saved cost of this model on this machine, or None. An invalid file is deleted with
    a warning.
    """
    try:
        path = _path(packed)
        profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        warnings.warn(
            f"{path} is not a profile ({type(error).__name__}); the model is measured again",
            stacklevel=2,
        )
        path.unlink(missing_ok=True)
        return None
    except (OSError, ValueError):
        return None  # the cache directory cannot be used, which save_profile warns about
    return profile.cost if profile.of == identity(packed) else None


def save_profile(packed: PackedModel, cost: ForwardCost) -> None:
    """Save a cost for later processes; warn if the cache directory cannot be written to."""
    try:
        path = _path(packed)
        profile = Profile(of=identity(packed), cost=cost)
        write_atomically(path, profile.model_dump_json(indent=1))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the profile could not be saved ({error}); the model is measured again next time",
            stacklevel=2,
        )


def drop_profile(packed: PackedModel) -> None:
    """Delete the saved cost, so that the next process measures the model again."""
    # If the cache directory cannot be used, there is no profile to delete.
    with contextlib.suppress(OSError, ValueError):
        _path(packed).unlink(missing_ok=True)


def _path(packed: PackedModel) -> Path:
    return kept_file("profiles", type(packed.model).__name__, identity(packed))
