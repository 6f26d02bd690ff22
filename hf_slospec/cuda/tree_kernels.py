"""Triton kernels of the ``triton`` attention backend, for packed batches with draft trees."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from hf_slospec.cuda.tree_attention import TreePlan
from hf_slospec.model.batch import AttentionRules

ENOUGH_PROGRAMS = 256  # programs that fill a large GPU: about two for each multiprocessor
MAX_SPLITS = 32  # parts into which a sequence's keys are divided, at most
LOG2_E = tl.constexpr(1.4426950408889634)


def tree_attention(
    query: torch.Tensor,  # [num_heads, num_tokens, key_dim]
    keys: torch.Tensor,  # [num_slots, num_kv_heads, key_dim]
    values: torch.Tensor,  # [num_slots, num_kv_heads, value_dim]
    plan: TreePlan,
    rules: AttentionRules,
) -> torch.Tensor:
    """Return attention of a packed batch, softmax in fp32.  -> [num_tokens, num_heads, value_dim]

    Each program computes one tile of tokens, for all query heads that share a KV head. If there are
    few tiles, the keys of a sequence are split among several programs, and a second kernel merges
    their results.

    With ``paths`` in the plan, keys are not split. The keys that a token attends to are numbered in
    the order of its path, and blocks of keys begin at multiples of the block size, so that the bits
    of the result depend neither on other tokens nor on how many of these keys are committed."""
    query, keys, values = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        for tensor in (query, keys, values)
    )
    num_heads, num_tokens, key_dim = query.shape
    num_kv_heads = keys.shape[1]
    value_dim = values.shape[-1]
    num_programs = len(plan.tiles) * num_kv_heads
    num_splits = (
        1 if plan.paths is not None else min(MAX_SPLITS, max(1, ENOUGH_PROGRAMS // num_programs))
    )
    is_split = num_splits > 1
    out = query.new_empty(num_tokens, num_heads, value_dim)
    # Any tensors stand in for arguments that the kernel does not read.
    parts = out
    lses = out
    sinks, positions, staged_positions, paths = (
        plan.tiles if tensor is None else tensor
        for tensor in (rules.sinks, plan.positions, plan.staged_positions, plan.paths)
    )
    if is_split:
        parts = query.new_empty(num_splits, num_tokens, num_heads, value_dim, dtype=torch.float32)
        lses = query.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    largest = max(key_dim, value_dim) * query.element_size()  # bytes
    with on_device_of(query):
        _attend[(len(plan.tiles), num_kv_heads, num_splits)](
            query, keys, values, parts, lses, sinks, plan.tiles, plan.mask, positions, staged_positions, paths,
            query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            plan.mask.shape[1], paths.shape[1], num_tokens, num_heads, rules.scaling,
            rules.softcap or 0.0, rules.window or 0, rules.chunk or 0,
            GROUPS=num_heads // num_kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_M=plan.num_rows, BLOCK_N=64 if largest <= 256 else 32,
            BLOCK_K=_block(key_dim), BLOCK_V=_block(value_dim), IS_SPLIT=is_split,
            HAS_WINDOW=rules.window is not None, HAS_CHUNK=rules.chunk is not None,
            HAS_SOFTCAP=rules.softcap is not None, HAS_SINKS=rules.sinks is not None, BY_PATH=plan.paths is not None,
            NUM_COLUMNS=plan.tiles.shape[1],
            IN_FP32=query.is_cpu,  # Triton's interpreter, which runs on CPU tensors, has no bf16
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if is_split:
            _merge[(num_tokens, num_heads)](
                parts, lses, out, num_tokens * num_heads, num_splits,
                VALUE_DIM=value_dim, BLOCK_V=_block(value_dim), BLOCK_S=triton.next_power_of_2(MAX_SPLITS), num_warps=2,
            )  # fmt: skip
    return out


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels are launched on a tensor's device."""
    is_current = tensor.is_cpu or tensor.device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(tensor.device)


def _block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def load_block(
    source, row, column, is_row, is_column, row_stride, column_stride, IN_FP32: tl.constexpr
):
    """Load a block of a strided matrix, with 0 outside of ``is_row`` and ``is_column``."""
    place = row[:, None] * row_stride + column[None, :] * column_stride
    block = tl.load(source + place, mask=is_row[:, None] & is_column[None, :], other=0.0)
    return block.to(tl.float32) if IN_FP32 else block  # the interpreter has no products of bf16


@triton.jit(
    do_not_specialize=["mask_width", "path_width", "num_tokens", "num_heads", "window", "chunk"]
)
def _attend(
    query, keys, values, out, lses, sinks, tiles, mask, positions, staged_positions, paths,
    query_head_stride, query_token_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    mask_width, path_width, num_tokens, num_heads, scaling, softcap, window, chunk,
    GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, BY_PATH: tl.constexpr, NUM_COLUMNS: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile, one KV head and one split of the keys; scores are scaled for
    exp2.

    Without splits, ``out`` is [num_tokens, num_heads, value_dim] in the model's dtype. Otherwise,
    ``out`` is [num_splits, num_tokens, num_heads, value_dim] f32, the results of each split, and
    ``lses`` [num_splits, num_tokens, num_heads] f32 their log-sum-exps to base 2, -inf where a row
    attends to no key of the split."""
    tile = tiles + tl.program_id(0) * NUM_COLUMNS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(tile).to(tl.int64)
    prefix_len = tl.load(tile + 1)
    num_keys = prefix_len + tl.load(tile + 2)
    first_token = tl.load(tile + 3)
    tile_tokens = tl.load(tile + 4)
    offset = tl.load(tile + 5)
    sequence = tl.load(tile + 6)
    is_chain = tl.load(tile + 7) != 0

    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUPS
    head = kv_head * GROUPS + rows % GROUPS
    is_row = (token < tile_tokens) & (rows < BLOCK_M // GROUPS * GROUPS)
    in_batch = (first_token + token).to(tl.int64)
    key_dims = tl.arange(0, BLOCK_K)
    value_dims = tl.arange(0, BLOCK_V)
    in_key = key_dims < KEY_DIM
    in_value = value_dims < VALUE_DIM
    query_row = in_batch * query_token_stride + head * query_head_stride
    query_block = load_block(query, query_row, key_dims, is_row, in_key, 1, 1, IN_FP32)

    if is_chain:  # the tile's tokens do not attend to later tokens of the chain
        num_keys = prefix_len + offset + tile_tokens
    low = 0
    if HAS_WINDOW:  # no token's position is before the first uncommitted one, prefix_len
        low = tl.maximum(prefix_len - window + 1, 0)
    if HAS_CHUNK:
        low = tl.maximum(prefix_len // chunk * chunk, low)
    per_split = tl.cdiv(tl.cdiv(num_keys - low, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = low + split * per_split
    end = tl.minimum(begin + per_split, num_keys)
    # From `first_own` on, a tree has `per_token` keys for each of the tile's tokens in turn: the
    # keys on its path.
    if BY_PATH:
        begin = begin // BLOCK_N * BLOCK_N
        first_own = tl.where(is_chain, num_keys, prefix_len // BLOCK_N * BLOCK_N)
        per_token = tl.maximum(tl.cdiv(num_keys - first_own, BLOCK_N) * BLOCK_N, BLOCK_N)
        end = tl.where(is_chain, num_keys, first_own + tile_tokens * per_token)
    if tile_tokens == 0:
        end = begin
    position = prefix_len + offset + token
    if HAS_WINDOW or HAS_CHUNK:
        position = tl.load(positions + in_batch, mask=is_row, other=0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and split == 0:
        row_max = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        is_key = key < end
        slot = start + key
        staged = key - prefix_len
        reader = is_row
        if BY_PATH:
            owner = tl.maximum(first_key - first_own, 0) // per_token
            is_own = key >= first_own
            key = key - owner * per_token
            path = paths + (first_token + owner).to(tl.int64) * path_width
            is_key = tl.where(is_own, key < prefix_len + tl.load(path), is_key)
            staged = key - prefix_len
            on_path = is_own & is_key & (staged >= 0)
            staged = tl.where(on_path, tl.load(path + 1 + staged, mask=on_path, other=0), staged)
            slot = start + prefix_len + staged
            reader = is_row & ((token == owner) | (first_key < first_own))
        key_block = load_block(
            keys + kv_head * key_head_stride, key_dims, slot, in_key, is_key, 1, key_slot_stride, IN_FP32
        )  # fmt: skip
        scores = tl.dot(query_block, key_block, input_precision="ieee") * scaling
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = scores * LOG2_E
        seen = reader[:, None] & is_key[None, :]
        key_position = key
        if first_key + BLOCK_N > prefix_len:
            is_staged = (staged >= 0) & is_key
            in_tree = is_chain & (staged[None, :] <= (offset + token)[:, None])
            if BY_PATH:
                in_tree = in_tree | (not is_chain)
            else:
                reads = is_row[:, None] & is_staged[None, :] & (not is_chain)
                in_mask = tl.load(
                    mask + in_batch[:, None] * mask_width + staged[None, :], mask=reads, other=0
                )
                in_tree = in_tree | (in_mask != 0)
            seen = seen & (in_tree | (staged < 0)[None, :])
            if HAS_WINDOW or HAS_CHUNK:
                at = tl.load(
                    staged_positions + sequence * mask_width + staged, mask=is_staged, other=0
                )
                key_position = tl.where(is_staged, at, key)
        if HAS_WINDOW:
            seen = seen & (position[:, None] - key_position[None, :] < window)
        if HAS_CHUNK:
            seen = seen & (position[:, None] // chunk == key_position[None, :] // chunk)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row may attend to no key of this block.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(row_max - base)
        value_block = load_block(
            values + kv_head * value_head_stride, slot, value_dims, is_key, in_value, value_slot_stride, 1, IN_FP32
        )  # fmt: skip
        sums = sums * kept[:, None] + tl.dot(
            weights.to(value_block.dtype), value_block, input_precision="ieee"
        )
        total = total * kept + tl.sum(weights, 1)
        row_max = new_max

    has_none = total == 0.0  # the row attends to no key of this split
    total = tl.where(has_none, 1.0, total)
    attended = sums / total[:, None]
    row = in_batch * num_heads + head
    if IS_SPLIT:
        row = split.to(tl.int64) * num_tokens * num_heads + row
        tl.store(
            lses + row, tl.where(has_none, float("-inf"), row_max + tl.log2(total)), mask=is_row
        )
    is_stored = is_row[:, None] & in_value[None, :]
    tl.store(
        out + row[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=is_stored,
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    parts, lses, out, num_rows, num_splits, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute attention of one token and head from the results of all splits; log-sum-exps are to
    base 2.
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_V)
    lse = tl.load(lses + split * num_rows + row, mask=split < num_splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest))
    is_used = (lse > float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :]
    part = tl.load(
        parts + (split * num_rows + row)[:, None] * VALUE_DIM + dims[None, :],
        mask=is_used,
        other=0.0,
    )
    merged = tl.sum(weights[:, None] * part, 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out + row * VALUE_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
