"""Signature of the attention backends, and the choice of one for a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from hf_slospec.cuda.flash_attention import FlashAttention, kernel_for
from hf_slospec.cuda.tree_attention import TreeAttention, why_no_kernel
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.attention.sdpa import masked_attention, sdpa_attention
from hf_slospec.model.batch import AttentionLayer, AttentionRules, Plans

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Attention of a packed batch's tokens over the keys visible to each of them."""

    __name__: str

    def __call__(
        self,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        keys: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: torch.Tensor,  # [num_slots, num_kv_heads, value_dim]
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor:
        """Return the output, [num_tokens, num_heads, value_dim]."""


def backend_for(attention: str, layers: Sequence[AttentionLayer], by_path: bool = False) -> Backend:
    """Return the backend named ``attention``; ``"auto"`` chooses the first of triton, flash, sdpa
    that a layer can use.

    With ``by_path``, the bits of a token's result depend on its path only on CUDA.

    Raises:
        UnsupportedOptionError: ``attention`` is ``"triton"`` or ``"flash"``, and no layer can use
            it.
    """
    if attention == "4d_mask":
        return masked_attention
    on_cuda = any(layer.shape.key.device.type == "cuda" for layer in layers)
    if attention == "sdpa" or (attention == "auto" and not on_cuda):
        return sdpa_attention
    if attention in ("auto", "triton"):
        reasons = dict.fromkeys(why_no_kernel(layer) for layer in layers)
        if None in reasons:
            return TreeAttention(by_path)
        why = "; ".join(map(str, reasons))
        if attention == "triton":
            raise _unavailable(attention, why)
        logger.debug("no attention by Triton: %s", why)
    kernels = [kernel_for(layer) for layer in layers]
    names = sorted({kernel.name for kernel in kernels if not isinstance(kernel, str)})
    if names:
        return FlashAttention(", ".join(names))
    why = "; ".join(dict.fromkeys(map(str, kernels)))
    if attention == "flash":
        raise _unavailable(attention, why)
    logger.debug("sdpa instead of flash attention: %s", why)
    return sdpa_attention


def why_no_triton(layers: Sequence[AttentionLayer]) -> str | None:
    """Return why some layer cannot use Triton's attention; None if all can."""
    return next(filter(None, map(why_no_kernel, layers)), None)


def _unavailable(attention: str, why: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f'attention="{attention}" is not available: {why}; use attention="auto"'
    )
