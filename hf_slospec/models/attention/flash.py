"""Attention by flash-attention kernels: what all tokens of a sequence see by kernel, the rest of a tree dense."""

from __future__ import annotations

import logging

import torch

from hf_slospec.models.attention.choice import kernel_on
from hf_slospec.models.attention.kernels import FlashKernel
from hf_slospec.models.attention.merge import attention_with_lse, merge, weigh_sinks
from hf_slospec.models.attention.packing import DenseBlock, Entries, Packing, Split, pack
from hf_slospec.models.attention.row import AttentionLayer, Row
from hf_slospec.models.attention.sdpa import sdpa_attention

logger = logging.getLogger(__name__)

MAX_DIM, DIM_STEP = 256, 8  # of a head, for FlashAttention-2 and what torch has of it


def kernel_for(layer: AttentionLayer) -> FlashKernel | str:
    """The kernel that can attend for a layer, as far as its shape says, or why none can."""
    key, value = layer.shape
    # What a latent layer attends with has not the size of what it caches.
    dims = (DIM_STEP, DIM_STEP) if layer.is_latent else (key.dim, value.dim)
    return _kernel_for(key.device, (key.dtype, value.dtype), dims, has_softcap=False)


def _kernel_for(
    device: torch.device, dtypes: tuple[torch.dtype, ...], dims: tuple[int, int], has_softcap: bool
) -> FlashKernel | str:
    kernel = kernel_on(device)
    if isinstance(kernel, str):
        return kernel
    if unknown := set(dtypes) - set(kernel.dtypes):
        return f"{kernel.name} does not compute in {unknown.pop()}"
    if len(set(dtypes)) > 1:
        return f"queries, keys and values differ in dtype: {dtypes}"
    key_dim, value_dim = dims
    if key_dim != value_dim or key_dim > MAX_DIM or key_dim % DIM_STEP:
        return f"{kernel.name} does not take heads of size {key_dim} with values of size {value_dim}"
    if has_softcap and not kernel.has_softcap:
        return f"{kernel.name} has no softcap"
    return kernel


class FlashAttention:
    """The ``flash`` backend; what the kernel cannot do is left to ``sdpa``, with a debug log."""

    def __init__(self, kernel_names: str):
        self.__name__ = f"flash_attention[{kernel_names}]"  # profiles are kept by it
        self._kernels: dict[tuple[object, ...], FlashKernel | str] = {}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        row: Row,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        kernel = self._kernel(query, keys, values, softcap)
        if isinstance(kernel, str):
            return sdpa_attention(query, keys, values, row, scaling, window, softcap, sinks)
        packing: Packing = row.plan(pack, query.device, window, query.shape[0], keys.shape[1])
        query = query.transpose(0, 1)
        out = torch.empty_like(query)
        if packing.chains is not None:
            own = _chains(kernel, query, keys, values, packing.chains, scaling, window, softcap, sinks)
            out[packing.chains.rows] = own.to(out.dtype)
        if packing.split is not None:
            own = _split(kernel, query, keys, values, packing.split, scaling, softcap, sinks)
            out[packing.split.rows] = own.to(out.dtype)
        return out

    def _kernel(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None
    ) -> FlashKernel | str:
        dtypes, dims = (query.dtype, keys.dtype, values.dtype), (query.shape[-1], values.shape[-1])
        key = query.device, dtypes, dims, softcap is not None
        if key not in self._kernels:
            kernel = self._kernels[key] = _kernel_for(*key)
            if isinstance(kernel, str):
                logger.debug("sdpa instead of flash attention: %s", kernel)
        return self._kernels[key]


def _chains(
    kernel: FlashKernel,
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    entries: Entries,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the tokens of long chains.  -> [len(entries.rows), num_heads, head_dim]"""
    out, lse = kernel(query[entries.rows], keys, values, entries, scaling, True, window, softcap)
    return out if sinks is None else weigh_sinks(out, lse.T, sinks)


def _split(
    kernel: FlashKernel,
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    split: Split,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of all other tokens.  -> [len(split.rows), num_heads, head_dim] f32"""
    outs, lses = [], []
    if split.entries is not None:
        out, lse = _ranges(kernel, query[split.entries.rows], keys, values, split.entries, scaling, softcap)
        lse = lse[split.pieces]
        # Of a range without keys, kernels say +inf, -inf or 0.
        lses.append(lse.masked_fill(split.is_empty[..., None], -torch.inf) if split.any_empty else lse)
        outs.append(out[split.pieces].float())
    if split.blocks:
        out, lse = _blocks(query, keys, values, split.blocks, len(split.rows), scaling, softcap)
        outs.append(out[None])
        lses.append(lse[None])
    out, lse = merge(torch.cat(outs), torch.cat(lses))
    return out if sinks is None else weigh_sinks(out, lse, sinks)


def _ranges(
    kernel: FlashKernel,
    query: torch.Tensor,  # [num_queries, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    entries: Entries,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query heads that share a KV head become more queries of it, so its keys are read once.

    Returns:
        out [num_queries, num_heads, head_dim] and lse [num_queries, num_heads] f32.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1)).transpose(1, 2)  # [num_queries, groups, num_kv_heads, head_dim]
    groups = grouped.shape[1]
    out, lse = kernel(grouped.flatten(0, 1), keys, values, entries, scaling, False, None, softcap)
    out = out.unflatten(0, (-1, groups)).transpose(1, 2).flatten(1, 2)
    return out, lse.unflatten(1, (-1, groups)).transpose(0, 1).flatten(1, 2)


def _blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: list[DenseBlock],
    num_rows: int,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out [num_rows, num_heads, head_dim] and lse [num_rows, num_heads], both f32"""
    out = query.new_zeros(num_rows, *query.shape[1:], dtype=torch.float32)
    lse = query.new_full(out.shape[:2], -torch.inf, dtype=torch.float32)
    for block in blocks:
        own, own_lse = attention_with_lse(
            query[block.rows], keys[block.slots], values[block.slots], block.mask, scaling, softcap
        )
        out[block.places] = own.flatten(0, 1)[block.real]
        lse[block.places] = own_lse.flatten(0, 1)[block.real]
    return out, lse
