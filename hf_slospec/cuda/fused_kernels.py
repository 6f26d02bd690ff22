"""Normalization, rotary embedding and gated activation as Triton kernels that round as
transformers' layers do.

Multiplications and additions are not fused where that would skip a rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_slospec.cuda.tree_kernels import on_device_of

# Values of the argument ``activation`` of gated_activation.
SILU = 0
GELU_TANH = 1


def rms_norm(
    states: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
) -> torch.Tensor:
    """Return RMS normalization over the last dimension.

    Args:
        states: [*, hidden], contiguous, in half precision.
        weight: [hidden].
        adds_one: multiply by ``1 + weight`` in fp32 (Gemma), else by ``weight`` in the dtype of
            ``states`` (Llama).
    """
    hidden = states.shape[-1]
    out = torch.empty_like(states)
    block = triton.next_power_of_2(hidden)
    with on_device_of(states):
        _rms_norm[(states.numel() // hidden,)](
            states, weight, out, eps,
            HIDDEN=hidden, BLOCK=block, ADDS_ONE=adds_one,
            num_warps=min(max(block // 256, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotate(
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim], last dimension contiguous
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    cos: torch.Tensor,  # [1, num_tokens, head_dim]
    sin: torch.Tensor,  # [1, num_tokens, head_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key with rotary embeddings, which rotate dimensions i and i + head_dim / 2
    together.
    """
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    outputs = [
        tensor.new_empty(num_tokens, tensor.shape[1], head_dim).transpose(0, 1)[None]
        for tensor in (query, key)
    ]
    with on_device_of(query):
        _rotate[(num_tokens, num_heads + num_kv_heads)](
            query, key, *outputs, cos, sin, query.stride(1), query.stride(2), key.stride(1), key.stride(2),
            cos.stride(1), sin.stride(1), num_heads, num_kv_heads,
            HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return outputs[0], outputs[1]


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """Return ``activation(gate) * up`` of contiguous tensors of one shape, in half precision."""
    out = torch.empty_like(gate)
    with on_device_of(gate):
        _gated_activation[(triton.cdiv(gate.numel(), 1024),)](
            gate, up, out, gate.numel(), ACTIVATION=activation, BLOCK=1024, num_warps=4
        )
    return out


@triton.jit
def _rms_norm(
    states, weight, out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADDS_ONE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    in_row = column < HIDDEN
    values = tl.load(states + row + column, mask=in_row, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=in_row, other=0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    if ADDS_ONE:
        normed = normed * (1.0 + scale.to(tl.float32))
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _rotate(
    query, key, new_query, new_key, cos, sin, query_head_stride, query_token_stride, key_head_stride,
    key_token_stride, cos_stride, sin_stride, num_heads, num_kv_heads, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    in_half = dim < HALF
    if head < num_heads:
        source = query + token * query_token_stride + head * query_head_stride
        destination = new_query + (token * num_heads + head) * HALF * 2
    else:
        source = key + token * key_token_stride + (head - num_heads) * key_head_stride
        destination = new_key + (token * num_kv_heads + head - num_heads) * HALF * 2
    first = tl.load(source + dim, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    dtype = new_query.dtype.element_ty
    for half in tl.static_range(2):
        place = half * HALF + dim
        by_cos = tl.load(cos + token * cos_stride + place, mask=in_half, other=0.0).to(tl.float32)
        by_sin = tl.load(sin + token * sin_stride + place, mask=in_half, other=0.0).to(tl.float32)
        if half == 0:
            rotated = _rounded(first * by_cos, dtype) - _rounded(second * by_sin, dtype)
        else:
            rotated = _rounded(second * by_cos, dtype) + _rounded(first * by_sin, dtype)
        tl.store(destination + place, rotated.to(dtype), mask=in_half)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    return values.to(DTYPE).to(tl.float32)


@triton.jit
def activated(gates, ACTIVATION: tl.constexpr):
    """Return SiLU or GELU of values in fp32."""
    if ACTIVATION == 0:
        result = gates * tl.sigmoid(gates)
    else:  # GELU, approximated by tanh(x) = 2 sigmoid(2x) - 1
        result = gates * tl.sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates))
    return result


@triton.jit
def _gated_activation(gate, up, out, num_values, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = index < num_values
    active = activated(tl.load(gate + index, mask=is_valid, other=0.0).to(tl.float32), ACTIVATION)
    factor = tl.load(up + index, mask=is_valid, other=0.0).to(tl.float32)
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + index, (active * factor).to(out.dtype.element_ty), mask=is_valid)
