"""The attention backends, all of one signature, and which one a model's layers get."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.models.attention.dense import masked_attention
from hf_slospec.models.attention.flash import FlashAttention, kernel_for
from hf_slospec.models.attention.packed_batch import AttentionLayer, PackedBatch
from hf_slospec.models.attention.sdpa import sdpa_attention

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Attention of a packed row's tokens to what each of them sees."""

    __name__: str

    def __call__(
        self,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        keys: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: torch.Tensor,  # [num_slots, num_kv_heads, value_dim]
        row: PackedBatch,
        scaling: float,
        window: int | None,  # in positions
        softcap: float | None,
        sinks: torch.Tensor | None,  # [num_heads]
    ) -> torch.Tensor:
        """-> [num_tokens, num_heads, value_dim]"""


def backend_for(attention: str, layers: Sequence[AttentionLayer]) -> Backend:
    """The backend of this name; auto is flash wherever a layer on CUDA can use it, and sdpa elsewhere.

    Raises:
        UnsupportedOptionError: flash was asked for, and none of the layers can use it.
    """
    if attention == "4d_mask":
        return masked_attention
    on_cuda = any(layer.shape.key.device.type == "cuda" for layer in layers)
    if attention == "sdpa" or (attention == "auto" and not on_cuda):
        return sdpa_attention
    found = [kernel_for(layer) for layer in layers]
    names = sorted({kernel.name for kernel in found if not isinstance(kernel, str)})
    if names:
        return FlashAttention(", ".join(names))
    why = "; ".join(dict.fromkeys(map(str, found)))
    if attention == "flash":
        raise UnsupportedOptionError(f'attention="flash" cannot be had: {why}; use attention="auto"')
    logger.debug("sdpa instead of flash attention: %s", why)
    return sdpa_attention
