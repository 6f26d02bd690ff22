"""The ``flash`` attention backend: flash-attention kernels for the keys that all tokens of a
sequence attend to, and dense attention for the keys that only some of them attend to.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import torch

from hf_slospec.cuda import flash_kernels
from hf_slospec.cuda.flash import Block, Entries, Packing, merged_attention, pack, weigh_sinks
from hf_slospec.cuda.flash_kernels import FlashKernel, KernelUnavailable, Load
from hf_slospec.cuda.tree_attention import why_wrong
from hf_slospec.model.attention.backends import KernelAttention
from hf_slospec.model.batch import AttentionLayer, AttentionRules, Plans
from hf_slospec.model.transfer import aligned

logger = logging.getLogger(__name__)

# Head sizes that FlashAttention-2 and torch's version of it take: multiples of 8 up to 256.
MAX_DIM = 256
DIM_STEP = 8


def why_no_kernel(layer: AttentionLayer) -> str | None:
    """Return why no flash-attention kernel can be used for a layer; None if one can."""
    kernel = _kernel_of(layer)
    return kernel if isinstance(kernel, str) else None


def new_flash_attention(layers: Iterable[AttentionLayer]) -> FlashAttention:
    """Return the backend, which is named after the kernels for these layers."""
    kernels = map(_kernel_of, layers)
    names = {kernel.name for kernel in kernels if not isinstance(kernel, str)}
    return FlashAttention(", ".join(sorted(names)))


def _kernel_of(layer: AttentionLayer) -> FlashKernel | str:
    key = layer.shape.key
    value = layer.shape.value
    # A latent layer attends with K and V of other sizes than it caches.
    dims = (DIM_STEP, DIM_STEP) if layer.is_latent else (key.dim, value.dim)
    return _kernel_for(
        key.device,
        (key.dtype, value.dtype),
        dims,
        has_softcap=False,
        is_chunked=layer.chunk is not None,
    )


def _kernel_for(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    dims: tuple[int, int],
    has_softcap: bool,
    is_chunked: bool,
) -> FlashKernel | str:
    if is_chunked:
        return "no kernel has chunked attention"
    if len(set(dtypes)) > 1:
        return f"queries, keys and values differ in dtype: {dtypes}"
    key_dim, value_dim = dims
    if key_dim != value_dim or key_dim > MAX_DIM or key_dim % DIM_STEP:
        return f"no kernel takes heads of size {key_dim} with values of size {value_dim}"
    return kernel_on(device, dtypes[0], key_dim, has_softcap)


def kernel_on(
    device: torch.device, dtype: torch.dtype, head_dim: int, needs_softcap: bool = False
) -> FlashKernel | str:
    """Return the first kernel that works with heads of this size, or a message with the reason
    against each kernel.
    """
    return _first_working(flash_kernels.KERNELS, device, dtype, head_dim, needs_softcap)


@functools.cache
def _first_working(
    kernels: tuple[Load, ...],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    needs_softcap: bool,
) -> FlashKernel | str:
    where = f"{device} in {dtype} with heads of size {head_dim}"
    reasons = dict[str, None]()
    for load in kernels:
        try:
            kernel = load(device)
        except KernelUnavailable as error:
            why = str(error)
        else:
            if dtype not in kernel.dtypes:
                why = f"{kernel.name} does not compute in {dtype}"
            elif needs_softcap and not kernel.has_softcap:
                why = f"{kernel.name} has no softcap"
            else:
                backend = functools.partial(attend, kernel)
                wrong = why_wrong(backend, device, dtype, head_dim, head_dim, kernel.has_softcap)
                if wrong is None:
                    logger.debug("flash attention on %s is done by %s", where, kernel.name)
                    return kernel
                why = f"{kernel.name} {wrong}"
        logger.debug("no flash attention on %s: %s", where, why)
        reasons[why] = None
    return "; ".join(reasons)


class FlashAttention(KernelAttention):
    """The ``flash`` attention backend, which chooses a kernel by each call's device, dtypes and
    head sizes.
    """

    def __init__(self, kernel_names: str):
        super().__init__()
        self.__name__ = f"flash_attention[{kernel_names}]"

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor | str:
        kernel = _kernel_of_call(query, keys, values, rules)
        if isinstance(kernel, str):
            return kernel
        return attend(kernel, query, keys, values, batch, rules)


def _kernel_of_call(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: AttentionRules
) -> FlashKernel | str:
    return _kernel_for(
        query.device,
        (query.dtype, keys.dtype, values.dtype),
        (query.shape[-1], values.shape[-1]),
        rules.softcap is not None,
        rules.chunk is not None,
    )


def attend(
    kernel: FlashKernel,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Plans,
    rules: AttentionRules,
) -> torch.Tensor:
    """Compute what a :class:`~hf_slospec.model.attention.backends.Backend` returns, with one
    flash-attention kernel.
    """
    keys = aligned(keys)
    values = aligned(values)
    packing: Packing = batch.plan(pack, query.device, rules.window, query.shape[0], keys.shape[1])
    query = query.transpose(0, 1)
    out = query.new_empty(query.shape)  # contiguous, because the layer reshapes it next
    if (chains := packing.chains) is not None:
        attended, lse = kernel(query[chains.token_indices], keys, values, chains, True, rules)
        if rules.sinks is not None:
            attended = weigh_sinks(attended, lse.T, rules.sinks)
        out[chains.token_indices] = attended.to(out.dtype)
    parts = None
    if packing.ranges is not None:
        parts = _attend_ranges(kernel, query, keys, values, packing.ranges, rules)
    for block in packing.blocks:
        attended = _attend_block(query, keys, values, block, parts, rules).flatten(0, 1)
        attended = attended if block.real_queries is None else attended[block.real_queries]
        out[block.real_token_indices] = attended.to(out.dtype)
    return out


def _attend_ranges(
    kernel: FlashKernel,
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    entries: Entries,
    rules: AttentionRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over ranges of keys that all tokens of a sequence attend to, and its
    log-sum-exp.

    Query heads that share a KV head are folded into its queries, so that its keys are read once.

    Returns:
        out [num_queries, groups, num_kv_heads, head_dim] and lse [num_kv_heads, num_queries,
        groups] f32.
    """
    num_kv_heads = keys.shape[1]
    # [num_queries, groups, num_kv_heads, head_dim]
    grouped = query[entries.token_indices].unflatten(1, (num_kv_heads, -1)).transpose(1, 2)
    out, lse = kernel(grouped.flatten(0, 1), keys, values, entries, False, rules)
    groups = grouped.shape[1]
    assert lse.shape == (num_kv_heads, len(out)), f"its log-sum-exp has the shape {lse.shape}"
    return out.unflatten(0, (-1, groups)), lse.unflatten(1, (-1, groups))


def _attend_block(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    parts: tuple[torch.Tensor, torch.Tensor] | None,  # results of _attend_ranges
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention of a block's tokens.  -> [num_sequences, num_queries, num_heads, head_dim]"""
    (num_sequences, num_queries) = block.token_indices.shape
    num_kv_heads = keys.shape[1]
    shape = num_sequences, num_kv_heads, num_queries, query.shape[1] // num_kv_heads  # groups last

    # Query heads that share a KV head are folded into its queries, as in _attend_ranges.
    def folded(tensor: torch.Tensor) -> torch.Tensor:
        """Reshape [num_sequences, num_kv_heads, num_queries, groups, *] to merge dimensions 0 and
        1, and 2 and 3.
        """
        return tensor.flatten(2, 3).flatten(0, 1)

    outs = query.new_empty(
        num_sequences * num_kv_heads, num_queries * shape[-1], 0, query.shape[-1]
    )
    lses = query.new_empty(outs.shape[:3], dtype=torch.float32)
    if parts is not None:
        out = parts[0][block.pieces]
        lse = parts[1][:, block.pieces]
        # Without keys, a kernel's lse is +inf, -inf or 0, and its out is arbitrary.
        if block.is_empty is not None:
            out = out.masked_fill(block.is_empty[..., None, None, None], 0.0)
            lse = lse.masked_fill(block.is_empty[None, ..., None], -torch.inf)
        outs = folded(out.permute(1, 4, 2, 3, 0, 5))
        lses = folded(lse.permute(2, 0, 3, 4, 1))
    if rules.sinks is not None:
        sink = rules.sinks.float().view(1, num_kv_heads, 1, -1, 1).expand(*shape, 1)
        lses = torch.cat((lses, folded(sink)), -1)
        outs = torch.cat((outs, outs.new_zeros(*outs.shape[:2], 1, outs.shape[-1])), 2)
    # Without sinks, single tokens that attend to one piece of keys have nothing to merge.
    if outs.shape[2] == 1 and not block.slots.shape[1]:
        merged = outs[:, :, 0]
    else:
        assert block.bias is not None, "a plan is used before completed()"
        queries = folded(
            query[block.token_indices].unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
        )
        key, value = (kv[block.slots].transpose(1, 2).flatten(0, 1) for kv in (keys, values))
        merged = merged_attention(queries, key, value, block.bias, outs, lses, rules)
    attended: torch.Tensor = merged.unflatten(1, shape[2:]).unflatten(0, shape[:2])
    return attended.transpose(1, 2).flatten(2, 3)
