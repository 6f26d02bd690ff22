"""Matrix products and means on CUDA in which a row's bits do not depend on the number of rows.

They serve ``exact="self"``; those for CPUs are in ``cpu/exact.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_slospec.model.linear_overrides import Attribute, LinearOverride, Override, OverrideOptions


class InvariantProducts(LinearOverride):
    """Override of products by weights, and of means over the last dimension, by a Triton kernel.

    Its tiles are fixed, while torch's kernels divide each row among more threads, and so add its
    elements in another order, if there are fewer rows.
    """

    @classmethod
    def for_model(
        cls, model: torch.nn.Module, options: OverrideOptions
    ) -> InvariantProducts | None:
        """Return the override for a model on CUDA; None on other devices or without ``exact``."""
        return cls() if options.exact is not None and options.device == "cuda" else None

    @property
    def functions(self) -> dict[Attribute, Override]:
        """Overrides of ``F.linear``, ``torch.addmm`` (for Conv1D) and ``mean`` (for norms)."""
        return {
            (F, "linear"): _linear,
            (torch, "addmm"): _addmm,
            (torch, "mean"): _mean,
            (torch.Tensor, "mean"): _mean,
        }


def _linear(
    _: Override, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = _product(input.reshape(-1, input.shape[-1]), weight, bias)
    return out.view(*input.shape[:-1], out.shape[-1])


def _addmm(original: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs:
        return original(*args, **kwargs)  # type: ignore[no-any-return]
    bias, rows, weight = args
    return _product(rows, weight.T, bias)


def _mean(
    original: Override, input: torch.Tensor, dim: Any = None, keepdim: bool = False, **others: Any
) -> torch.Tensor:
    """Return means over the last dimension as products with ones; over other dimensions, the result
    of ``original``.
    """
    if dim not in (-1, (-1,), [-1]) or others or not input.is_cuda:
        arguments = {} if dim is None else {"dim": dim, "keepdim": keepdim}
        return original(input, **arguments, **others)  # type: ignore[no-any-return]
    size = input.shape[-1]
    sums = _product(input.reshape(-1, size), input.new_ones(1, size), None)
    means = sums.view(*input.shape[:-1], 1) / size
    return means if keepdim else means[..., 0]


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows @ weight.T + bias``.  -> [num_rows, outputs]"""
    # Imported here, as Triton comes with torch for CUDA only.
    from hf_slospec.cuda.few_row_kernels import invariant_product

    return invariant_product(rows, weight, bias)
