"""Stand-ins for the Triton kernels, each one operator to whoever traces it; those of exact bits are
interpreted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from unittest import mock

import torch
import torch.nn.functional as F

from hf_slospec.cuda import few_row_kernels, fused_kernels, tree_kernels
from hf_slospec.cuda import few_row_kernels as invariant_kernels
from hf_slospec.cuda.few_row_kernels import invariant_product as product
from hf_slospec.cuda.tree_attention import TreePlan
from hf_slospec.cuda.tree_kernels import tree_attention
from hf_slospec.model.attention.sdpa import dense_attention
from hf_slospec.model.batch import AttentionRules


def tree_attention_stand_in(query, keys, values, plan, rules):
    """-> [num_tokens, num_heads, value_dim]"""
    return _attend(
        query, keys, values, plan.tiles, plan.mask, plan.positions, plan.staged_positions, plan.paths, plan.num_rows,
        *rules[:-1],  # layers with a bias attend by another backend
    )  # fmt: skip


@torch.library.custom_op("hf_slospec_tests::tree_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor | None,
    staged_positions: torch.Tensor | None,
    paths: torch.Tensor | None,
    num_rows: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    chunk: int | None,
) -> torch.Tensor:
    if paths is not None:  # its bits matter
        plan = TreePlan(tiles, mask, positions, staged_positions, paths, num_rows)
        return tree_attention(
            query, keys, values, plan, AttentionRules(scaling, window, softcap, sinks, chunk)
        )
    out = query.new_zeros(query.shape[1], query.shape[0], values.shape[-1])
    for start, prefix_len, num_staged, first, count, offset, sequence, is_chain in tiles.tolist():
        if not count:
            continue
        own = slice(first, first + count)
        num_keys = prefix_len + num_staged
        seen = torch.ones(count, num_keys, dtype=torch.bool)
        staged = mask[own, :num_staged]
        seen[:, prefix_len:] = (
            torch.ones(count, num_staged).tril(offset).bool() if is_chain else staged
        )
        if positions is not None and staged_positions is not None:
            at = torch.cat((torch.arange(prefix_len), staged_positions[sequence, :num_staged]))
            if window is not None:
                seen &= positions[own, None] - at[None] < window
            if chunk is not None:
                seen &= positions[own, None] // chunk == at[None] // chunk
        bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        key, value = (kv[start : start + num_keys].transpose(0, 1) for kv in (keys, values))
        out[own] = dense_attention(
            query[:, own], key, value, bias, AttentionRules(scaling, window, softcap, sinks)
        ).transpose(0, 1)
    return out


@_attend.register_fake
def _(query, keys, values, *_):
    return query.new_empty(query.shape[1], query.shape[0], values.shape[-1])


@torch.library.custom_op("hf_slospec_tests::invariant_product", mutates_args=())
def invariant_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """-> [num_rows, outputs], by Triton's interpreter"""
    return product(rows, weight, bias)


@torch.library.custom_op("hf_slospec_tests::rms_norm", mutates_args=())
def rms_norm(
    states: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
) -> torch.Tensor:
    """-> [*, hidden]"""
    normed = states.float() * (states.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (
        (normed * (1.0 + weight.float())).to(states.dtype)
        if adds_one
        else normed.to(states.dtype) * weight
    )


@torch.library.custom_op("hf_slospec_tests::rotate", mutates_args=())
def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> query and key, of their shapes"""

    def turned(states):
        first, second = states.chunk(2, -1)
        return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return turned(query), turned(key)


@torch.library.custom_op("hf_slospec_tests::gated_activation", mutates_args=())
def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """-> of the shape of gate"""
    return (
        F.silu(gate) if activation == fused_kernels.SILU else F.gelu(gate, approximate="tanh")
    ) * up


@torch.library.custom_op("hf_slospec_tests::gated_product", mutates_args=())
def gated_product(
    rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int
) -> torch.Tensor:
    """-> [num_rows, outputs]"""
    function = (
        F.silu
        if activation == fused_kernels.SILU
        else functools.partial(F.gelu, approximate="tanh")
    )
    return function(F.linear(rows, gate)) * F.linear(rows, up)


@gated_product.register_fake
def _(rows, gate, up, activation):
    return rows.new_empty(len(rows), len(gate))


@torch.library.custom_op("hf_slospec_tests::joint_products", mutates_args=())
def joint_products(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """-> [num_rows, outputs] for each weight"""
    return [F.linear(rows, *own) for own in zip(weights, biases, strict=True)]


@joint_products.register_fake
def _(rows, weights, biases):
    return [rows.new_empty(len(rows), len(weight)) for weight in weights]


for op, shapes in ((rms_norm, 1), (rotate, 2), (gated_activation, 1)):
    op.register_fake(
        lambda *given, n=shapes: (
            torch.empty_like(given[0]) if n == 1 else (*map(torch.empty_like, given[:2]),)
        )
    )


@contextlib.contextmanager
def triton_stand_ins():
    """Use these instead of the kernels."""
    with (
        mock.patch.object(tree_kernels, "tree_attention", tree_attention_stand_in),
        mock.patch.object(invariant_kernels, "invariant_product", invariant_product),
        mock.patch.object(fused_kernels, "rms_norm", rms_norm),
        mock.patch.object(fused_kernels, "rotate", rotate),
        mock.patch.object(fused_kernels, "gated_activation", gated_activation),
        mock.patch.object(few_row_kernels, "joint_products", joint_products),
        mock.patch.object(few_row_kernels, "gated_product", gated_product),
    ):
        yield
