"""The kernel of each shape of weight, chosen by measurement on this machine and kept for later processes."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from hf_slospec.models.device.machine import kept_file, machine, native_dtypes, write_atomically
from hf_slospec.models.linear.cpu_kernels import PACKING, Kernel, Matrix, Plain, works

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module or nothing

CPU = torch.device("cpu")
SIZES = (1, 4, 8, 16, 64, 256)  # tokens at which kernels are timed
STEP_SIZES = 4  # the first sizes are those of steps; a packed layout is chosen by their sum
MEASURED_BYTES = 2**24  # weights of one shape that are timed, in turn, so that caches do not hold them
REPEATS = 3
CALM_S = 0.02  # between two interruptions of a machine that is idle otherwise
SMALL_BYTES = 2**20  # bytes per weight; smaller ones stay in caches, where packing gains little
HOPELESS = 3.0  # times the fastest; such a kernel is not timed for more tokens
WORTHWHILE = 0.95  # share of torch's own time; a copy must save more than the rest


class Choice(BaseModel):
    """The kernel of weights of one shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str | None  # a name in PACKING; None: torch's own
    is_faster: tuple[bool, ...] = ()  # than torch's own, by SIZES
    seconds: dict[str, tuple[float | None, ...]] = {}  # seconds per product with one weight, by kernel and SIZES

    def packs(self, num_tokens: int) -> bool:
        """Return whether to use the packed weight for so many tokens."""
        return self.is_faster[_bucket(num_tokens)]


PLAIN = Choice(kernel=None)


class _Kept(BaseModel):
    """Choices as they are kept on disk."""

    model_config = ConfigDict(extra="forbid")

    of: dict[str, object]
    choices: dict[str, Choice]


def choose(weights: Sequence[torch.Tensor]) -> Choice:
    """Return the kernel for weights of one shape and dtype, measured if this machine has not measured it yet.

    Args:
        weights: [outputs, inputs] each, in turn; some of the weights of a model.
    """
    weight = weights[0]
    choices = _choices(torch.get_num_threads())
    name = f"{str(weight.dtype).removeprefix('torch.')} {weight.shape[0]}x{weight.shape[1]}"
    if name not in choices:
        kernels = {kernel: make for kernel, make in PACKING.items() if works(kernel, weight.dtype)}
        measured = _measured(weights, kernels) if kernels else PLAIN
        choices[name] = measured or _usual(weight, kernels)
        if measured is not None and measured.seconds:
            _keep({name: measured})
    return choices[name]


def _usual(weight: torch.Tensor, kernels: Collection[str]) -> Choice:
    """Return what most machines choose, for one that is too busy to be measured."""
    order = "MKL", *(("OneDNN", "FBGEMM") if native_dtypes().get(weight.dtype, True) else ("FBGEMM",))
    name = next((name for name in order if name in kernels), None)
    if name is None or weight.nbytes < SMALL_BYTES:
        return PLAIN
    return Choice(kernel=name, is_faster=(False, *(True for _ in SIZES[1:])))


@torch.no_grad()
def _measured(weights: Sequence[torch.Tensor], kernels: Mapping[str, Kernel]) -> Choice | None:
    """Return the kernel that is fastest; None if other processes disturbed the measurement."""
    most = math.ceil(MEASURED_BYTES / weights[0][0].nbytes)  # outputs; large output layers have more
    weights = [weight[:most] for weight in weights[: math.ceil(MEASURED_BYTES / weights[0].nbytes)]]
    makers: dict[str, Kernel] = {"Plain": Plain, **kernels}
    packed = {name: [packed_by(make, weight) for weight in weights] for name, make in makers.items()}
    matrices = {name: [matrix for matrix in own if matrix is not None] for name, own in packed.items() if any(own)}
    seconds: dict[str, list[float | None]] = {name: [] for name in matrices}
    for num_tokens in SIZES:
        tokens = weights[0].new_ones(num_tokens, weights[0].shape[1])
        many = slice(None) if num_tokens <= SIZES[STEP_SIZES - 1] else slice(1)  # computing takes longer than reading
        in_time = {name: own[many] for name, own in matrices.items() if None not in seconds[name]}
        fastest = _seconds(in_time, tokens) or _seconds(in_time, tokens)  # new threads may share a core at first
        if fastest is None:
            return None
        least = min(fastest.values())
        for name, own in seconds.items():
            found = fastest.get(name)
            own.append(None if found is None or found > HOPELESS * least else round(found, 9))
    return _choice(seconds)


def _seconds(matrices: Mapping[str, list[Matrix]], tokens: torch.Tensor) -> dict[str, float] | None:
    """Return the fastest seconds per weight of each kernel, interleaved; None if most were taken at a busy time."""
    fastest = dict.fromkeys(matrices, math.inf)
    for own in matrices.values():
        own[0](tokens, None)  # the first call for a size may compile
    num_disturbed = 0
    for _ in range(REPEATS):
        for name, own in matrices.items():
            num_before, begun_s = _num_preemptions(), time.perf_counter()
            for matrix in own:
                matrix(tokens, None)
            seconds = time.perf_counter() - begun_s
            fastest[name] = min(fastest[name], seconds / len(own))
            num_disturbed += _num_preemptions() - num_before > 1 + seconds / CALM_S
    return None if 2 * num_disturbed > REPEATS * len(matrices) else fastest


def _num_preemptions() -> int:
    """Return how often other processes took a core from this one; 0 where the system does not count it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _choice(seconds: dict[str, list[float | None]]) -> Choice:
    """Return the kernel with the shortest sum over the sizes of steps, if it beats torch's own."""
    times = {name: [math.inf if s is None else s for s in own] for name, own in seconds.items()}
    kept = {name: tuple(own) for name, own in seconds.items()}
    plain = times.pop("Plain")
    # Where torch's own kernel is faster it is used, as the weight is still there.
    combined = {name: sum(map(min, own[:STEP_SIZES], plain[:STEP_SIZES])) for name, own in times.items()}
    best = min(combined, key=lambda name: combined[name], default=None)
    if best is None or not combined[best] < WORTHWHILE * sum(plain[:STEP_SIZES]):
        return Choice(kernel=None, seconds=kept)
    is_faster = tuple(own < other for own, other in zip(times[best], plain, strict=True))
    return Choice(kernel=best, is_faster=is_faster, seconds=kept)


def packed_by(make: Kernel, weight: torch.Tensor) -> Matrix | None:
    """Return the packed weight; None if the kernel cannot hold its values."""
    try:
        return make(weight.contiguous())
    except OverflowError:
        return None


@functools.lru_cache(maxsize=4096)
def _bucket(num_tokens: int) -> int:
    """Return the index in SIZES of the smallest size that is not smaller, else of the largest."""
    return next((index for index, size in enumerate(SIZES) if num_tokens <= size), len(SIZES) - 1)


@functools.cache
def _choices(num_threads: int) -> dict[str, Choice]:
    """Return the choices of this process for a number of threads; those that were kept, at first."""
    return _kept()


def _kept() -> dict[str, Choice]:
    """Return what is kept for this machine; nothing if the file is missing or cannot be used."""
    try:
        kept = _Kept.model_validate_json(_path().read_text(encoding="utf-8")).choices
    except (OSError, ValueError):
        return {}
    return {name: choice for name, choice in kept.items() if _is_possible(name, choice)}


def _is_possible(name: str, choice: Choice) -> bool:
    """Return whether this version could have made a choice."""
    if choice.kernel is None:
        return True
    dtype = getattr(torch, name.split(" ")[0], None)
    is_known = choice.kernel in PACKING and len(choice.is_faster) == len(SIZES)
    return is_known and isinstance(dtype, torch.dtype) and works(choice.kernel, dtype)


def _keep(choices: dict[str, Choice]) -> None:
    """Keep the choices, with those that other processes have kept meanwhile."""
    try:
        kept = _Kept(of=machine(CPU), choices=_kept() | choices)
        write_atomically(_path(), kept.model_dump_json(indent=1))
    except (OSError, ValueError) as error:
        warnings.warn(f"the choice of kernels could not be saved ({error}); it is made again next time", stacklevel=2)


def _path() -> Path:
    return kept_file("kernels", "cpu", machine(CPU))
