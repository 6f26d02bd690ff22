"""Products and means on CUDA in which the bits of a row do not depend on how many rows there are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_slospec.model.linear_overrides import Attribute, LinearOverride, Override, OverrideOptions


class InvariantProducts(LinearOverride):
    """Computes products, and means over the last dimension, by a kernel with fixed tiles.

    torch's kernels divide a row among as many threads as the number of rows leaves.
    """

    @classmethod
    def for_model(
        cls, model: torch.nn.Module, options: OverrideOptions
    ) -> InvariantProducts | None:
        """Return the products of a model on CUDA; None if exactness is not wanted."""
        return cls() if options.exact is not None and options.device == "cuda" else None

    @property
    def functions(self) -> dict[Attribute, Override]:
        """Products of linear layers and of transformers' Conv1D, and means of norms."""
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
    """Return means over the last dimension as products with ones; over others, as torch does."""
    if dim not in (-1, (-1,), [-1]) or others or not input.is_cuda:
        arguments = {} if dim is None else {"dim": dim, "keepdim": keepdim}
        return original(input, **arguments, **others)  # type: ignore[no-any-return]
    size = input.shape[-1]
    sums = _product(input.reshape(-1, size), input.new_ones(1, size), None)
    means = sums.view(*input.shape[:-1], 1) / size
    return means if keepdim else means[..., 0]


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return products by a weight [outputs, inputs].  -> [num_rows, outputs]"""
    # Triton comes with torch for CUDA only.
    from hf_slospec.cuda.few_row_kernels import invariant_product

    return invariant_product(rows, weight, bias)
