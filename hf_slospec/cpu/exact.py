"""Matrix products on a CPU in which a row's bits do not depend on the number of rows.

They serve ``exact="bits"`` and ``exact="self"``; those for CUDA are in ``cuda/exact.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import addmm  # torch's own, although ExactProducts replaces torch.addmm and F.linear
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from hf_slospec.cpu import operators
from hf_slospec.cpu.quantised import PackedMatrix, dense
from hf_slospec.model.linear_overrides import Attribute, LinearOverride, Override, OverrideOptions
from hf_slospec.model.version import ModelVersion

# Numbers of inputs that torch's kernel may add up to a partial sum before it adds that to the
# total; 0: it has no partial sums. oneDNN's bf16 products of one row have partial sums of 512
# inputs where AVX-512 multiplies pairs.
CHUNKS = (0, 256, 512, 1024, 2048)
SIZES = (1, 2, 4, 8, 16, 32)  # numbers of rows in a group, which torch multiplies at once
TRIED_ROWS = 256  # rows that a trial compares
MAX_TRIED_PRODUCTS = 2**22  # elements of a trial's product; with more, fewer rows are compared
MAX_TRIED_WEIGHTS = 2**22  # elements of a trial's weight; with more, fewer outputs are compared
# Rows to which each group is padded if torch computes a single row with other bits than several,
# and ``exact="self"`` does not ask for the bits of the single row.
PADDED_SIZE = 16
ALIGNMENT = 64  # bytes to which torch aligns the tensors that it allocates
Product = Callable[[torch.Tensor], torch.Tensor]  # [1, num_rows, inputs] -> [1, num_rows, outputs]


class ProductKind(NamedTuple):
    """Computation by which rows are multiplied by weights of one shape."""

    # All rows at once by the kernel of operators.cpp, with partial sums of so many inputs (see
    # CHUNKS); None: by torch, in groups of rows.
    chunk: int | None = None
    sizes: tuple[int, ...] = ()  # numbers of rows that a group may have, ascending


class ExactProducts(LinearOverride):
    """Override of products by weights: the bits of each row do not depend on the other rows.

    With ``as_one``, a row has the bits that torch computes for this row alone. If the kernel of
    operators.cpp can add in the order of torch's kernel, which trials show, it multiplies all rows
    at once; otherwise torch multiplies them in groups, of one row each in the worst case. Functions
    are replaced rather than layers, as products outside of linear layers have to be exact, too.
    """

    def __init__(self, as_one: bool):
        self._as_one = as_one
        self._copies = WeakIdKeyDictionary()  # weight -> PackedMatrix

    @classmethod
    def for_model(cls, model: torch.nn.Module, options: OverrideOptions) -> ExactProducts | None:
        """Return the override for a model on a CPU; None on other devices or without ``exact``."""
        is_wanted = options.exact is not None and options.device == "cpu"
        return cls(as_one=options.exact == "bits") if is_wanted else None

    @property
    def num_bytes(self) -> int:
        """Bytes of copies of weights."""
        return sum(copy.num_bytes for copy in self._copies.values())

    @property
    def functions(self) -> dict[Attribute, Override]:
        """Overrides of ``F.linear``, and of ``torch.addmm`` for transformers' Conv1D."""
        return {(F, "linear"): self._linear, (torch, "addmm"): self._addmm}

    def renew(self, version: ModelVersion) -> None:
        """Drop the copies, as weights may have changed."""
        self._copies.clear()

    def _addmm(self, original: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        bias, rows, weight = args
        return self._product(rows[None], weight, bias, is_transposed=True)[0]

    def _linear(
        self,
        _: Override,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = input.reshape(1, -1, input.shape[-1])
        out = self._product(rows, weight, bias, is_transposed=False)
        return out.view(*input.shape[:-1], out.shape[-1])

    def _product(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        """Return ``rows`` [1, num_rows, inputs] times a weight, plus the bias.  -> [1, num_rows,
        outputs]
        """
        shape = tuple(weight.shape)
        threads = torch.get_num_threads()
        kind = product_kind(
            rows.dtype, shape, is_transposed, bias is not None, self._as_one, threads
        )
        if kind.chunk is None:
            return _in_groups(rows, kind.sizes, _plain(weight, bias, is_transposed))
        copy: PackedMatrix | None = self._copies.get(weight)
        if copy is None:
            with torch.inference_mode(False):  # copies may outlive the caller's inference mode
                plain = weight.detach()
                codes = dense(plain.T if is_transposed else plain, kind.chunk)
                copy = PackedMatrix(codes, is_invariant=True)
            self._copies[weight] = copy
        return copy(rows, bias)


def _plain(weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool) -> Product:
    """Return a function that multiplies rows by a weight with torch's kernels.

    The weight is [outputs, inputs], or [inputs, outputs] with ``is_transposed``.
    """
    if is_transposed:
        assert bias is not None
        return lambda rows: addmm(bias, rows[0], weight)[None]
    return lambda rows: linear(rows, weight, bias)


def _in_groups(rows: torch.Tensor, sizes: tuple[int, ...], product: Product) -> torch.Tensor:
    """Return products of rows [1, num_rows, inputs], computed in groups of ``sizes[-1]`` rows.

    The last group is padded to the smallest of ``sizes`` that holds it.
    """
    outputs = []
    for part in rows[0].split(sizes[-1]):
        num_rows = len(part)
        padding = next(size for size in sizes if size >= num_rows) - num_rows
        part = F.pad(part, (0, 0, 0, padding)) if padding else part
        # Aligned, and with the strides of stock decoding, as the order of MKL's sums depends on the
        # alignment and on the strides of dimensions of size 1.
        part = part.clone() if part.data_ptr() % ALIGNMENT else part
        outputs.append(product(part[None])[:, :num_rows])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@functools.cache
@torch.no_grad()
def product_kind(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    is_transposed: bool,
    has_bias: bool,
    as_one: bool,
    num_threads: int,
) -> ProductKind:
    """Return a computation that is exact for weights of one shape, found by trials.

    In a trial, all sums are zero but for rounding errors, which shows any other order of additions.

    Args:
        dtype: dtype of weights and rows.
        shape: [outputs, inputs], or [inputs, outputs] with ``is_transposed``.
        is_transposed: weights are stored as [inputs, outputs].
        has_bias: a bias is added.
        as_one: see :class:`ExactProducts`.
        num_threads: threads of torch; only a key of the cache, as torch's sums may depend on it.
    """
    del num_threads
    inputs, outputs = shape if is_transposed else shape[::-1]
    outputs = min(outputs, max(MAX_TRIED_WEIGHTS // inputs, 1))
    num_rows = max(
        SIZES[-1], min(TRIED_ROWS, MAX_TRIED_PRODUCTS // outputs // SIZES[-1] * SIZES[-1])
    )
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(2 * (inputs // 2), generator=generator, device="cpu")
    tensors = []
    for size, sign in ((outputs, 1), (num_rows, -1)):
        half = torch.randn(size, inputs // 2, generator=generator, device="cpu")
        whole = torch.cat((half, sign * half), dim=1)[:, order]
        tensors.append(F.pad(whole, (0, inputs % 2)).to(dtype))
    weight = tensors[0]
    rows = tensors[1][None]
    bias = None
    if has_bias:
        bias = 1e-6 * torch.randn(outputs, generator=generator, device="cpu").to(dtype)
    product = _plain(weight.T.contiguous() if is_transposed else weight, bias, is_transposed)
    alone = _in_groups(rows, (1,), product)
    for chunk in CHUNKS if _has_operators() else ():
        try:
            packed = PackedMatrix(dense(weight, chunk), is_invariant=True)
        except OverflowError:
            break
        if not as_one or torch.equal(packed(rows, bias), alone):
            return ProductKind(chunk)
    sizes = [1]
    for size in SIZES[1:]:
        if not torch.equal(_in_groups(rows, (size,), product), alone):
            break
        sizes.append(size)
    return ProductKind(sizes=tuple(sizes) if as_one or len(sizes) > 1 else (PADDED_SIZE,))


@functools.cache
def _has_operators() -> bool:
    """Return whether the kernel of operators.cpp can be used; build and load it first."""
    if operators.why_unsupported() is not None:
        return False
    try:
        operators.build()
        operators.load()
    except (OSError, RuntimeError):
        return False
    return True
