"""Comparison of logits that two forward paths return."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Relative errors of a node's logits: above rounding, and far below the error of attending to a
# wrong token.
TOLERANCE = 5e-3
REDUCED_TOLERANCE = 0.1


def relative_error(ours: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each token's centred logits.  -> [num_tokens] f64"""
    ours, plain = (
        logits.double() - logits.double().mean(-1, keepdim=True) for logits in (ours, plain)
    )
    smallest = torch.finfo(
        plain.dtype
    ).tiny  # a token without an embedding may have equal logits for all tokens
    errors: torch.Tensor = (ours - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=smallest)
    return errors


def tolerance_in(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative error of logits that rounding may cause in layers of these dtypes."""
    return (
        TOLERANCE if all(torch.finfo(dtype).bits >= 32 for dtype in dtypes) else REDUCED_TOLERANCE
    )
