"""CPU kernels for linear layers that read packed weights, and the choice of one by measurement."""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict

from hf_slospec.model.machine import kept_file, machine, native_dtypes, write_atomically

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # the module or nothing

logger = logging.getLogger(__name__)

TYPICAL_TOKENS = 8  # tokens of a forward for which libraries may optimize a packed layout
# Token counts for which a kernel must agree with torch's before it is used.
TRIED_TOKENS = (1, 3, 8, 40, 300)
TOLERANCE = 0.05  # relative error up to which kernels agree; above rounding in any dtype


class Matrix(Protocol):
    """A packed copy of a weight; calls multiply inputs by the weight."""

    num_bytes: int  # bytes of the copy
    num_rounded: int  # elements that the copy holds only approximately

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``input @ weight.T + bias``.  [num_tokens, inputs] -> [num_tokens, outputs], in
        the input's dtype
        """


# Packs a contiguous weight [outputs, inputs]; raises OverflowError if the format cannot hold the
# values.
Kernel = Callable[[torch.Tensor], Matrix]


class Plain:
    """Torch's own kernels, which read the weight as it is."""

    num_bytes = num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(input, self.weight, bias)


class OneDNN:
    """oneDNN's kernels, which torch's compiler uses for frozen weights in half precision."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_tokens = len(input)
        # Padded, as oneDNN caches half a megabyte or more for each number of tokens.
        if missing := -num_tokens % granularity(num_tokens):
            input = F.pad(input, (0, 0, 0, missing))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.packed, bias, "none", [], ""
        )
        return out[:num_tokens] if missing else out


class MKL:
    """MKL's kernels, which torch's compiler uses for frozen weights in fp32."""

    num_rounded = 0

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, TYPICAL_TOKENS)
        # Stands in for the weight, of which the operator reads only the shape.
        self.sizes = weight.new_empty(1).expand(weight.shape)
        self.num_bytes = weight.nbytes  # MKL reserves more, but writes no more

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The packed layout serves any number of tokens, but the operator reads it only if its last
        # argument is the input's number of tokens.
        out: torch.Tensor = torch.ops.mkl._mkl_linear(
            input, self.packed, self.sizes, bias, len(input)
        )
        return out


class FBGEMM:
    """FBGEMM's kernels for fp16 weights, which multiply in fp32 and so are more precise than
    kernels that round inputs to bf16.
    """

    def __init__(self, weight: torch.Tensor):
        if not float(weight.abs().max()) <= torch.finfo(torch.float16).max:  # NaN is refused, too
            raise OverflowError("fp16 cannot hold the weight")
        self.num_rounded = int((weight.half().to(weight.dtype) != weight).sum())
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.num_bytes = weight.nbytes

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(input.float(), self.packed)
        return (out if bias is None else out.add_(bias)).to(input.dtype)


BLOCKS = "Blocks"  # name of the kernel that only compiled forwards use; see cpu/operators.py
PACKING: dict[str, Kernel] = {"OneDNN": OneDNN, "MKL": MKL, "FBGEMM": FBGEMM}
# Dtypes of the weights that a kernel takes, by its name.
DTYPES = {
    "OneDNN": (torch.float32, torch.bfloat16, torch.float16),
    "MKL": (torch.float32,),
    "FBGEMM": (torch.bfloat16, torch.float16),
}


def granularity(num_tokens: int) -> int:
    """Return the step by which ``num_tokens`` is rounded up to a padded number of tokens; padding
    adds at most an eighth.
    """
    return 1 << max(num_tokens.bit_length() - 4, 0) if num_tokens < 512 else 64


@functools.cache
def works(name: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel of PACKING is correct in this dtype on this machine."""
    return dtype in DTYPES[name] and is_right(PACKING[name], dtype)


@functools.cache
def is_right(make: Kernel, dtype: torch.dtype) -> bool:
    """Return whether a kernel agrees with torch's products in this dtype on this machine."""
    weight = torch.linspace(-1, 1, 96 * 64, device="cpu").sin().view(96, 64).to(dtype)
    try:
        matrix = make(weight)
        return all(_agrees(matrix, weight, num_tokens) for num_tokens in TRIED_TOKENS)
    except (AttributeError, RuntimeError, OverflowError) as error:
        # Missing from this torch, or refused for this CPU.
        logger.debug("kernel %s cannot be used in %s: %s", make, dtype, error)
        return False


def _agrees(matrix: Matrix, weight: torch.Tensor, num_tokens: int) -> bool:
    values = torch.linspace(-1, 1, num_tokens * weight.shape[1], device="cpu").cos()
    tokens = values.view(num_tokens, -1).to(weight.dtype)
    plain = F.linear(tokens.double(), weight.double())
    return bool((matrix(tokens, None).double() - plain).norm() <= TOLERANCE * plain.norm())


CPU = torch.device("cpu")
SIZES = (1, 4, 8, 16, 64, 256)  # numbers of tokens at which kernels are timed
# The first sizes are typical of decode steps; the sum of their times decides which kernel is used.
STEP_SIZES = 4
# Bytes of weights of one shape that a timing reads in turn, so that caches do not hold them all.
MEASURED_BYTES = 2**24
REPEATS = 3  # timings of a kernel, the shortest of which counts
CALM_S = 0.02  # seconds between two preemptions of a process on an idle machine
SMALL_BYTES = 2**20  # bytes of a weight; smaller ones stay in caches, where packing gains little
MAX_SLOWDOWN = 3.0  # multiple of the fastest time; slower kernels are not timed at larger sizes
RETRY_S = 60.0  # seconds until a kernel is measured again, where the machine was too busy
WORTHWHILE = 0.95  # share of the time of torch's kernel that a packed weight must stay below


class KernelChoice(BaseModel):
    """The kernel chosen for weights of one shape, and the times of all kernels that were tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str | None  # name in PACKING; None: torch's own kernel
    is_faster: tuple[bool, ...] = ()  # by SIZES: the kernel is faster than torch's
    # Seconds per product with one weight, by kernel and SIZES.
    seconds: dict[str, tuple[float | None, ...]] = {}

    def packs(self, num_tokens: int) -> bool:
        """Return whether the packed weight is faster for this many tokens."""
        return self.is_faster[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]


PLAIN = KernelChoice(kernel=None)


class SavedChoices(BaseModel):
    """Content of the file in which choices are saved."""

    model_config = ConfigDict(extra="forbid")

    of: dict[str, object]  # the machine that they were measured on
    choices: dict[str, KernelChoice]


def choose(
    weights: Sequence[torch.Tensor],
    more: Mapping[str, Kernel] = MappingProxyType({}),
) -> KernelChoice:
    """Return the kernel for weights of one shape and dtype; measure it if no choice was saved.

    Args:
        weights: a model's weights of this shape, [outputs, inputs] each.
        more: kernels to try besides PACKING, by name.
    """
    weight = weights[0]
    choices = _choices(torch.get_num_threads())
    dtype_name = str(weight.dtype).removeprefix("torch.")
    name = " ".join([dtype_name, f"{weight.shape[0]}x{weight.shape[1]}", *more])
    if name not in choices or time.monotonic() >= _retry_s.get(name, math.inf):
        kernels = {kernel: make for kernel, make in PACKING.items() if works(kernel, weight.dtype)}
        kernels |= {kernel: make for kernel, make in more.items() if is_right(make, weight.dtype)}
        measured = _measured(weights, kernels) if kernels else PLAIN
        choices[name] = measured or _default_choice(weight, kernels)
        _retry_s[name] = math.inf if measured else time.monotonic() + RETRY_S
        if measured is not None and measured.seconds:
            _save({name: measured})
    return choices[name]


def _default_choice(weight: torch.Tensor, kernels: Collection[str]) -> KernelChoice:
    """Return the kernel that is fastest on most machines, without any measurement."""
    is_native = native_dtypes().get(weight.dtype, True)
    order = (BLOCKS, "MKL", *(("OneDNN",) if is_native else ()), "FBGEMM")
    name = next((name for name in order if name in kernels), None)
    if name is None or (is_native and weight.nbytes < SMALL_BYTES):
        return PLAIN
    if not is_native:  # torch's kernel emulates the dtype: slowly, for any number of tokens
        return KernelChoice(kernel=name, is_faster=(True,) * len(SIZES))
    # Blocks is made for few tokens; for more than 16, torch's kernel may be faster.
    return KernelChoice(
        kernel=name, is_faster=(False, *(name != BLOCKS or size <= 16 for size in SIZES[1:]))
    )


@torch.no_grad()
def _measured(
    weights: Sequence[torch.Tensor], kernels: Mapping[str, Kernel]
) -> KernelChoice | None:
    """Return the fastest kernel; None if other processes disturbed the measurement."""
    # Of a large output layer, only a part is timed.
    max_outputs = math.ceil(MEASURED_BYTES / weights[0][0].nbytes)
    weights = [
        weight[:max_outputs] for weight in weights[: math.ceil(MEASURED_BYTES / weights[0].nbytes)]
    ]
    makers: dict[str, Kernel] = {"Plain": Plain, **kernels}
    matrices = {
        name: [packed for weight in weights if (packed := packed_by(make, weight)) is not None]
        for name, make in makers.items()
    }
    seconds: dict[str, list[float | None]] = {name: [] for name in matrices if matrices[name]}
    for num_tokens in SIZES:
        tokens = weights[0].new_ones(num_tokens, weights[0].shape[1])
        # One weight is enough for larger sizes, where computing takes longer than reading the
        # weight.
        timed = slice(None) if num_tokens <= SIZES[STEP_SIZES - 1] else slice(1)
        candidates = {
            name: matrices[name][timed] for name, by_size in seconds.items() if None not in by_size
        }
        # Measured again if disturbed, as new threads may share a core at first.
        fastest = _seconds(candidates, tokens) or _seconds(candidates, tokens)
        if fastest is None:
            return None
        limit_s = MAX_SLOWDOWN * min(fastest.values())
        for name, by_size in seconds.items():
            kernel_s = fastest.get(name)
            by_size.append(None if kernel_s is None or kernel_s > limit_s else round(kernel_s, 9))
    return _choice(seconds)


def _seconds(matrices: Mapping[str, list[Matrix]], tokens: torch.Tensor) -> dict[str, float] | None:
    """Return each kernel's shortest seconds per weight; None if other processes disturbed more than
    half of the timings.
    """
    fastest = dict.fromkeys(matrices, math.inf)
    for copies in matrices.values():
        copies[0](tokens, None)  # the first call for a size may compile
    num_disturbed = 0
    for _ in range(REPEATS):
        for name, copies in matrices.items():
            num_before = _num_preemptions()
            begun_s = time.perf_counter()
            for matrix in copies:
                matrix(tokens, None)
            seconds = time.perf_counter() - begun_s
            fastest[name] = min(fastest[name], seconds / len(copies))
            num_disturbed += _num_preemptions() - num_before > 1 + seconds / CALM_S
    return None if 2 * num_disturbed > REPEATS * len(matrices) else fastest


def _num_preemptions() -> int:
    """Return how often this process was preempted; 0 where the system does not count it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _choice(seconds: dict[str, list[float | None]]) -> KernelChoice:
    """Return the kernel that takes the least time at the sizes of decode steps, or torch's own if
    the gain is not worth a copy of the weight.
    """
    times = {
        name: [math.inf if s is None else s for s in by_size] for name, by_size in seconds.items()
    }
    measured = {name: tuple(by_size) for name, by_size in seconds.items()}
    plain = times.pop("Plain")
    # Torch's kernel is used at sizes where it is faster, as the plain weight is kept.
    combined = {
        name: sum(map(min, by_size[:STEP_SIZES], plain[:STEP_SIZES]))
        for name, by_size in times.items()
    }
    best = min(combined, key=lambda name: combined[name], default=None)
    if best is None or not combined[best] < WORTHWHILE * sum(plain[:STEP_SIZES]):
        return KernelChoice(kernel=None, seconds=measured)
    is_faster = tuple(
        packed_s < plain_s for packed_s, plain_s in zip(times[best], plain, strict=True)
    )
    return KernelChoice(kernel=best, is_faster=is_faster, seconds=measured)


def packed_by(make: Kernel, weight: torch.Tensor) -> Matrix | None:
    """Return a packed copy of a weight; None if the kernel's format cannot hold its values."""
    try:
        return make(weight.contiguous())
    except OverflowError:
        return None


_retry_s: dict[str, float] = {}  # key of a choice -> time.monotonic() when it is measured again


@functools.cache
def _choices(num_threads: int) -> dict[str, KernelChoice]:
    """Return this process's choices for a number of threads, to which ``choose`` adds; at first,
    the saved ones.
    """
    return _saved()


def _saved() -> dict[str, KernelChoice]:
    """Return the choices saved for this machine; none if the file is missing or cannot be used."""
    try:
        choices = SavedChoices.model_validate_json(_path().read_text(encoding="utf-8")).choices
    except (OSError, ValueError):
        return {}
    return {name: choice for name, choice in choices.items() if _is_possible(name, choice)}


def _is_possible(name: str, choice: KernelChoice) -> bool:
    """Return whether a saved choice is still valid for this version of torch and of the package."""
    if choice.kernel is None:
        return True
    dtype_name, _, *more = name.split(" ")
    dtype = getattr(torch, dtype_name, None)
    if len(choice.is_faster) != len(SIZES) or not isinstance(dtype, torch.dtype):
        return False
    return choice.kernel in more or (choice.kernel in PACKING and works(choice.kernel, dtype))


def _save(choices: dict[str, KernelChoice]) -> None:
    """Add choices to the file, which other processes may have extended meanwhile."""
    try:
        saved = SavedChoices(of=machine(CPU), choices=_saved() | choices)
        write_atomically(_path(), saved.model_dump_json(indent=1))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the choice of kernels could not be saved ({error}); it is made again next time",
            stacklevel=2,
        )


def _path() -> Path:
    return kept_file("kernels", "cpu", machine(CPU))
