"""Reference forwards of drafting heads: their formulas with plain torch, one entry list at a time, without a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float, size: int) -> torch.Tensor:
    """Rotate the first ``size`` channels of [num_tokens, num_heads, head_dim], in halves."""
    angles = positions[:, None] * theta ** (-torch.arange(0, size, 2) / size)  # [num_tokens, size / 2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of [num_tokens, num_heads, head_dim], its heads side by side."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def heads(x: torch.Tensor, weights: Weights, name: str, head_dim: int) -> torch.Tensor:
    return linear(x, weights, name).unflatten(-1, (-1, head_dim))


def mlp(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    gated = F.silu(linear(x, weights, f"{name}.gate_proj")) * linear(x, weights, f"{name}.up_proj")
    return linear(gated, weights, f"{name}.down_proj")


def llama_attention(x: torch.Tensor, weights: Weights, name: str, positions: torch.Tensor, config: Any) -> torch.Tensor:
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    q, k, v = (heads(x, weights, f"{name}.{part}_proj", size) for part in "qkv")
    q, k = (rotated(part, positions, theta, size) for part in (q, k))
    return linear(attention(q, k, v), weights, f"{name}.o_proj")


def eagle3(
    embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, weights: Weights, config: Any, flags: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and next hidden states of [num_tokens, hidden]."""
    eps, name = config.rms_norm_eps, "midlayer"
    embedded = rms_norm(embeds, weights[f"{name}.input_layernorm.weight"], eps)
    normed = rms_norm(hidden, weights[f"{name}.hidden_norm.weight"], eps)
    both = torch.cat((embedded, normed), dim=-1)
    y = normed if "norm_before_residual" in flags else hidden
    y = y + llama_attention(both, weights, f"{name}.self_attn", positions, config)
    y = y + mlp(rms_norm(y, weights[f"{name}.post_attention_layernorm.weight"], eps), weights, f"{name}.mlp")
    output = rms_norm(y, weights["norm.weight"], eps)
    return output @ weights["lm_head.weight"].T, output if "norm_output" in flags else y


def eagle3_combined(features: torch.Tensor, weights: Weights, eps: float, flags: set[str]) -> torch.Tensor:
    if "norm_before_fc" in flags:
        features = rms_norm(features, weights["input_norm.weight"], eps)
    if "fc_norm" in flags:
        parts = features.chunk(3, dim=-1)
        features = torch.cat([rms_norm(x, weights[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(parts)], dim=-1)
    return features @ weights["fc.weight"].T


def mtp(
    embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, weights: Weights, config: Any, lm_head: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """MTP layer around a Llama layer."""
    eps, name = config.rms_norm_eps, "layers.0"
    embeds = rms_norm(embeds, weights["pre_fc_norm_embedding.weight"], eps)
    hidden = rms_norm(hidden, weights["pre_fc_norm_hidden.weight"], eps)
    y = torch.cat((embeds, hidden), dim=-1) @ weights["fc.weight"].T
    normed = rms_norm(y, weights[f"{name}.input_layernorm.weight"], eps)
    y = y + llama_attention(normed, weights, f"{name}.self_attn", positions, config)
    y = y + mlp(rms_norm(y, weights[f"{name}.post_attention_layernorm.weight"], eps), weights, f"{name}.mlp")
    y = rms_norm(y, weights["norm.weight"], eps)
    return y @ lm_head.T, y


def qwen3_next_mtp(
    embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, weights: Weights, config: Any, lm_head: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """MTP layer of Qwen3-Next: norms around 1, gated attention with partial rotation, experts and a shared one."""
    size, eps, name = config.head_dim, config.rms_norm_eps, "layers.0"

    def norm(x: torch.Tensor, part: str) -> torch.Tensor:
        return rms_norm(x, 1 + weights[f"{part}.weight"], eps)

    y = torch.cat((norm(embeds, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")), dim=-1)
    y = y @ weights["fc.weight"].T

    x, own = norm(y, f"{name}.input_layernorm"), f"{name}.self_attn"
    q, gate = heads(x, weights, f"{own}.q_proj", 2 * size).chunk(2, dim=-1)
    q, k = norm(q, f"{own}.q_norm"), norm(heads(x, weights, f"{own}.k_proj", size), f"{own}.k_norm")
    rope = config.rope_parameters
    num_rotated = int(size * rope["partial_rotary_factor"])
    q, k = (rotated(part, positions, rope["rope_theta"], num_rotated) for part in (q, k))
    attended = attention(q, k, heads(x, weights, f"{own}.v_proj", size)) * gate.flatten(1).sigmoid()
    y = y + linear(attended, weights, f"{own}.o_proj")

    x, own = norm(y, f"{name}.post_attention_layernorm"), f"{name}.mlp"
    chosen = (x @ weights[f"{own}.gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok)
    routed = chosen.values / chosen.values.sum(-1, keepdim=True)
    for row in range(len(x)):
        for share, expert in zip(routed[row], chosen.indices[row].tolist(), strict=True):
            y[row] += share * mlp(x[row], weights, f"{own}.experts.{expert}")
    shared = mlp(x, weights, f"{own}.shared_expert")
    y = norm(y + (x @ weights[f"{own}.shared_expert_gate.weight"].T).sigmoid() * shared, "norm")
    return y @ lm_head.T, y
