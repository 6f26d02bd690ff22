"""Choice of a CPU kernel for each shape of weight, measured on this machine and saved for later processes."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from pydantic import BaseModel, ConfigDict

from hf_slospec.models.device.machine import kept_file, machine, native_dtypes, write_atomically
from hf_slospec.models.linear.cpu_kernels import BLOCKS, PACKING, Kernel, Matrix, Plain, is_right, works

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module or nothing

CPU = torch.device("cpu")
SIZES = (1, 4, 8, 16, 64, 256)  # tokens at which kernels are timed
STEP_SIZES = 4  # the first sizes are those of steps; a packed layout is chosen by their sum
MEASURED_BYTES = 2**24  # bytes of the weights of one shape that are timed in turn; caches cannot hold them all
REPEATS = 3
CALM_S = 0.02  # seconds between two preemptions on an idle machine
SMALL_BYTES = 2**20  # bytes of a weight; smaller ones stay in caches, where packing gains little
MAX_SLOWDOWN = 3.0  # times the fastest kernel; slower ones are not timed for larger sizes
WORTHWHILE = 0.95  # share of the time of torch's kernel; a packed weight must take less


class Choice(BaseModel):
    """Kernel for weights of one shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str | None  # name in PACKING; None: torch's own kernel
    is_faster: tuple[bool, ...] = ()  # by SIZES: the kernel is faster than torch's
    seconds: dict[str, tuple[float | None, ...]] = {}  # seconds per product with one weight, by kernel and SIZES

    def packs(self, num_tokens: int) -> bool:
        """Return whether the packed weight is faster for this many tokens."""
        return self.is_faster[_bucket(num_tokens)]


PLAIN = Choice(kernel=None)


class _Kept(BaseModel):
    """File of choices."""

    model_config = ConfigDict(extra="forbid")

    of: dict[str, object]  # the machine
    choices: dict[str, Choice]


def choose(
    weights: Sequence[torch.Tensor],
    more: Mapping[str, Kernel] = MappingProxyType({}),
) -> Choice:
    """Return the kernel for weights of one shape and dtype, measured if this machine has not measured it yet.

    Args:
        weights: a model's weights of this shape, [outputs, inputs] each.
        more: kernels beside those of PACKING, by name.
    """
    weight = weights[0]
    choices = _choices(torch.get_num_threads())
    name = " ".join([str(weight.dtype).removeprefix("torch."), f"{weight.shape[0]}x{weight.shape[1]}", *more])
    if name not in choices:
        kernels = {kernel: make for kernel, make in PACKING.items() if works(kernel, weight.dtype)}
        kernels |= {kernel: make for kernel, make in more.items() if is_right(make, weight.dtype)}
        measured = _measured(weights, kernels) if kernels else PLAIN
        choices[name] = measured or _default_choice(weight, kernels)
        if measured is not None and measured.seconds:
            _keep({name: measured})
    return choices[name]


def _default_choice(weight: torch.Tensor, kernels: Collection[str]) -> Choice:
    """Return the kernel that is fastest on most machines, as this one is too busy to be measured."""
    order = BLOCKS, "MKL", *(("OneDNN", "FBGEMM") if native_dtypes().get(weight.dtype, True) else ("FBGEMM",))
    name = next((name for name in order if name in kernels), None)
    if name is None or weight.nbytes < SMALL_BYTES:
        return PLAIN
    # Blocks are for the sizes of steps; other libraries may have faster products of many tokens.
    return Choice(kernel=name, is_faster=(False, *(name != BLOCKS or size <= 16 for size in SIZES[1:])))


@torch.no_grad()
def _measured(weights: Sequence[torch.Tensor], kernels: Mapping[str, Kernel]) -> Choice | None:
    """Return the fastest kernel; None if other processes disturbed the measurement."""
    max_outputs = math.ceil(MEASURED_BYTES / weights[0][0].nbytes)  # large output layers have more
    weights = [weight[:max_outputs] for weight in weights[: math.ceil(MEASURED_BYTES / weights[0].nbytes)]]
    makers: dict[str, Kernel] = {"Plain": Plain, **kernels}
    packed = {name: [packed_by(make, weight) for weight in weights] for name, make in makers.items()}
    matrices = {
        name: [matrix for matrix in copies if matrix is not None] for name, copies in packed.items() if any(copies)
    }
    seconds: dict[str, list[float | None]] = {name: [] for name in matrices}
    for num_tokens in SIZES:
        tokens = weights[0].new_ones(num_tokens, weights[0].shape[1])
        # One weight is enough for larger sizes, where computing takes longer than reading the weight.
        timed = slice(None) if num_tokens <= SIZES[STEP_SIZES - 1] else slice(1)
        candidates = {name: copies[timed] for name, copies in matrices.items() if None not in seconds[name]}
        fastest = _seconds(candidates, tokens) or _seconds(candidates, tokens)  # new threads may share a core at first
        if fastest is None:
            return None
        limit_s = MAX_SLOWDOWN * min(fastest.values())
        for name, by_size in seconds.items():
            kernel_s = fastest.get(name)
            by_size.append(None if kernel_s is None or kernel_s > limit_s else round(kernel_s, 9))
    return _choice(seconds)


def _seconds(matrices: Mapping[str, list[Matrix]], tokens: torch.Tensor) -> dict[str, float] | None:
    """Return the fastest seconds per weight of each kernel, timed in turn; None if most runs were disturbed."""
    fastest = dict.fromkeys(matrices, math.inf)
    for copies in matrices.values():
        copies[0](tokens, None)  # the first call for a size may compile
    num_disturbed = 0
    for _ in range(REPEATS):
        for name, copies in matrices.items():
            num_before, begun_s = _num_preemptions(), time.perf_counter()
            for matrix in copies:
                matrix(tokens, None)
            seconds = time.perf_counter() - begun_s
            fastest[name] = min(fastest[name], seconds / len(copies))
            num_disturbed += _num_preemptions() - num_before > 1 + seconds / CALM_S
    return None if 2 * num_disturbed > REPEATS * len(matrices) else fastest


def _num_preemptions() -> int:
    """Return how often this process was preempted; 0 where the system does not count it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _choice(seconds: dict[str, list[float | None]]) -> Choice:
    """Return the kernel with the least time over the sizes of steps, if it is worth a copy of the weight."""
    times = {name: [math.inf if s is None else s for s in by_size] for name, by_size in seconds.items()}
    measured = {name: tuple(by_size) for name, by_size in seconds.items()}
    plain = times.pop("Plain")
    # Sizes for which torch's kernel is faster use it, as the plain weight is kept beside the copy.
    combined = {name: sum(map(min, by_size[:STEP_SIZES], plain[:STEP_SIZES])) for name, by_size in times.items()}
    best = min(combined, key=lambda name: combined[name], default=None)
    if best is None or not combined[best] < WORTHWHILE * sum(plain[:STEP_SIZES]):
        return Choice(kernel=None, seconds=measured)
    is_faster = tuple(packed_s < plain_s for packed_s, plain_s in zip(times[best], plain, strict=True))
    return Choice(kernel=best, is_faster=is_faster, seconds=measured)


def packed_by(make: Kernel, weight: torch.Tensor) -> Matrix | None:
    """Return the packed weight; None if the kernel cannot hold its values."""
    try:
        return make(weight.contiguous())
    except OverflowError:
        return None


@functools.lru_cache(maxsize=4096)
def _bucket(num_tokens: int) -> int:
    """Return the index of the smallest size of at least ``num_tokens``; the last one if all are smaller."""
    return next((index for index, size in enumerate(SIZES) if num_tokens <= size), len(SIZES) - 1)


@functools.cache
def _choices(num_threads: int) -> dict[str, Choice]:
    """Return the choices for a number of threads, which begin with the saved ones."""
    return _kept()


def _kept() -> dict[str, Choice]:
    """Return the choices saved for this machine; none if the file is missing or cannot be used."""
    try:
        kept = _Kept.model_validate_json(_path().read_text(encoding="utf-8")).choices
    except (OSError, ValueError):
        return {}
    return {name: choice for name, choice in kept.items() if _is_possible(name, choice)}


def _is_possible(name: str, choice: Choice) -> bool:
    """Return whether this version of torch and of the package could have made a choice."""
    if choice.kernel is None:
        return True
    dtype_name, _, *more = name.split(" ")
    dtype = getattr(torch, dtype_name, None)
    if len(choice.is_faster) != len(SIZES) or not isinstance(dtype, torch.dtype):
        return False
    return choice.kernel in more or (choice.kernel in PACKING and works(choice.kernel, dtype))


def _keep(choices: dict[str, Choice]) -> None:
    """Save the choices, with those that other processes have saved meanwhile."""
    try:
        kept = _Kept(of=machine(CPU), choices=_kept() | choices)
        write_atomically(_path(), kept.model_dump_json(indent=1))
    except (OSError, ValueError) as error:
        warnings.warn(f"the choice of kernels could not be saved ({error}); it is made again next time", stacklevel=2)


def _path() -> Path:
    return kept_file("kernels", "cpu", machine(CPU))
