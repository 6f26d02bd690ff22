"""Reference forwards of drafting heads: their formulas with plain torch, one entry list at a time,
without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, positions, theta, size, share=1.0):
    """Rotate the first ``size`` channels of [num_tokens, num_heads, head_dim], in halves.

    ``share`` is the part of the pairs that turn; others stay as they are.
    """
    angles = positions[:, None] * theta ** (
        -torch.arange(0, size, 2) / size
    )  # [num_tokens, size / 2]
    angles[:, int(share * size / 2) :] = 0.0
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    first = x[..., : size // 2]
    second = x[..., size // 2 : size]
    rest = x[..., size:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention(q, k, v, window=None):
    """Return causal attention of [num_tokens, num_heads, head_dim], its heads side by side."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    distances = torch.arange(len(q))[:, None] - torch.arange(len(q))
    unseen = (distances < 0) | (distances >= (window or math.inf))
    scores = scores.masked_fill(unseen, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


def linear(x, weights, name):
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def heads(x, weights, name, head_dim):
    return linear(x, weights, name).unflatten(-1, (-1, head_dim))


def mlp(x, weights, name):
    gated = F.silu(linear(x, weights, f"{name}.gate_proj")) * linear(x, weights, f"{name}.up_proj")
    return linear(gated, weights, f"{name}.down_proj")


def layer_attention(x, weights, name, positions, config, window=None):
    """Return the attention of a Llama or Qwen3 layer, [num_tokens, hidden]."""
    eps = config.rms_norm_eps
    size = config.head_dim
    q, k, v = (heads(x, weights, f"{name}.{part}_proj", size) for part in "qkv")
    if f"{name}.q_norm.weight" in weights:
        q = rms_norm(q, weights[f"{name}.q_norm.weight"], eps)
        k = rms_norm(k, weights[f"{name}.k_norm.weight"], eps)
    q, k = (rotated(part, positions, config.rope_parameters["rope_theta"], size) for part in (q, k))
    return linear(attention(q, k, v, window), weights, f"{name}.o_proj")


def layer_mlp(x, weights, name, config):
    """Return a residual stream after a layer's MLP, [num_tokens, hidden]."""
    norm = weights[f"{name}.post_attention_layernorm.weight"]
    return x + mlp(rms_norm(x, norm, config.rms_norm_eps), weights, f"{name}.mlp")


def eagle3(embeds, hidden, positions, weights, config, windows=(None,), flags=()):
    """Return logits and next hidden states, [num_tokens, hidden], of Llama or Qwen3 layers."""
    eps = config.rms_norm_eps
    for index, window in enumerate(windows):
        name = f"layers.{index}"
        x = rms_norm(hidden if index else embeds, weights[f"{name}.input_layernorm.weight"], eps)
        if not index:
            normed = rms_norm(hidden, weights[f"{name}.hidden_norm.weight"], eps)
            x = torch.cat((x, normed), dim=-1)
            hidden = normed if "norm_before_residual" in flags else hidden
        attended = layer_attention(x, weights, f"{name}.self_attn", positions, config, window)
        hidden = layer_mlp(hidden + attended, weights, name, config)
    output = rms_norm(hidden, weights["norm.weight"], eps)
    return output @ weights["lm_head.weight"].T, output if "norm_output" in flags else hidden


def eagle3_combined(features, weights, eps, flags):
    if "norm_before_fc" in flags:
        features = rms_norm(features, weights["input_norm.weight"], eps)
    if "fc_norm" in flags:
        parts = features.chunk(3, dim=-1)
        features = torch.cat(
            [rms_norm(x, weights[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(parts)], dim=-1
        )
    return features @ weights["fc.weight"].T


def mtp(embeds, hidden, positions, weights, config, lm_head):
    """MTP layer around a Llama layer."""
    eps = config.rms_norm_eps
    name = "layers.0"
    embeds = rms_norm(embeds, weights["pre_fc_norm_embedding.weight"], eps)
    hidden = rms_norm(hidden, weights["pre_fc_norm_hidden.weight"], eps)
    y = torch.cat((embeds, hidden), dim=-1) @ weights["fc.weight"].T
    normed = rms_norm(y, weights[f"{name}.input_layernorm.weight"], eps)
    y = y + layer_attention(normed, weights, f"{name}.self_attn", positions, config)
    y = rms_norm(layer_mlp(y, weights, name, config), weights["norm.weight"], eps)
    return y @ lm_head.T, y


def block_states(features, embeds, weights, layers, head_dim, eps=1e-6):
    """Return the normed states of a block behind a text with these features, [block, hidden].

    Each layer has a window and a flag whether it is causal within the block.
    """
    theta = 10000.0

    def convolved(x, kernels, name, side):
        """Convolve along the block, of heads that do."""
        if kernels is None:
            return x
        base = weights[f"{name}.base_kernel"][side]  # [num_taps, hidden]
        delta = kernels.view(len(x), 2, len(base), -1)[:, side].repeat_interleave(16, dim=-1)
        return torch.stack(
            [
                sum((base[t] + delta[i, t]) * x[i - t] for t in range(min(i + 1, len(base))))
                for i in range(len(x))
            ]
        )

    def kernels_of(x, name):
        own = f"{name}.kernel_projection.weight"
        return x @ weights[own].T if own in weights else None

    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    positions = torch.arange(len(context) + len(embeds))
    states = embeds
    own = positions[len(context) :]
    distances = own[:, None] - positions  # from keys to queries
    for index, (window, is_causal) in enumerate(layers):
        name = f"layers.{index}"
        x = rms_norm(states, weights[f"{name}.input_layernorm.weight"], eps)
        kernels = kernels_of(x, f"{name}.attention_conv")
        x = convolved(x, kernels, f"{name}.attention_conv", 0)
        sources = torch.cat((context, x))
        q, k = (
            heads(x, weights, f"{name}.self_attn.q_proj", head_dim),
            heads(sources, weights, f"{name}.self_attn.k_proj", head_dim),
        )
        q = rotated(
            rms_norm(q, weights[f"{name}.self_attn.q_norm.weight"], eps), own, theta, head_dim
        )
        k = rotated(
            rms_norm(k, weights[f"{name}.self_attn.k_norm.weight"], eps), positions, theta, head_dim
        )
        v = heads(sources, weights, f"{name}.self_attn.v_proj", head_dim)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        hidden = ((distances < 0) & is_causal) | (distances.abs() >= (window or math.inf))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(head_dim)
        attended = torch.einsum(
            "hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v
        ).flatten(1)
        attended = linear(attended, weights, f"{name}.self_attn.o_proj")
        states = states + convolved(attended, kernels, f"{name}.attention_conv", 1)
        x = rms_norm(states, weights[f"{name}.post_attention_layernorm.weight"], eps)
        kernels = kernels_of(x, f"{name}.mlp_conv")
        x = mlp(convolved(x, kernels, f"{name}.mlp_conv", 0), weights, f"{name}.mlp")
        states = states + convolved(x, kernels, f"{name}.mlp_conv", 1)
    return rms_norm(states, weights["norm.weight"], eps)


def gemma4_attention(x, sources, seen, weights, name, head_dim):
    """Return Gemma 4's attention of the last tokens of some sources, with a mask [num_tokens,
    num_sources].
    """
    eps = 1e-6
    theta = 1e6
    share = 0.25
    positions = torch.arange(len(sources))
    q, k = (
        heads(x, weights, f"{name}.q_proj", head_dim),
        heads(sources, weights, f"{name}.k_proj", head_dim),
    )
    v = (
        heads(sources, weights, f"{name}.v_proj", head_dim)
        if f"{name}.v_proj.weight" in weights
        else k
    )
    q = rotated(
        rms_norm(q, weights[f"{name}.q_norm.weight"], eps),
        positions[-len(x) :],
        theta,
        head_dim,
        share,
    )
    k = rotated(
        rms_norm(k, weights[f"{name}.k_norm.weight"], eps), positions, theta, head_dim, share
    )
    v = rms_norm(v, torch.ones(head_dim), eps)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~seen, -torch.inf)  # not scaled
    return linear(
        torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1), weights, f"{name}.o_proj"
    )


def gemma4_rest(states, attended, weights, name):
    """Return a Gemma 4 layer's output, by its input and what its attention returned."""

    def norm(x, part):
        return rms_norm(x, weights[f"{name}.{part}.weight"], 1e-6)

    states = states + norm(attended, "post_attention_layernorm")
    x = norm(states, "pre_feedforward_layernorm")
    x = F.gelu(linear(x, weights, f"{name}.mlp.gate_proj"), approximate="tanh") * linear(
        x, weights, f"{name}.mlp.up_proj"
    )
    states = states + norm(
        linear(x, weights, f"{name}.mlp.down_proj"), "post_feedforward_layernorm"
    )
    return states * weights[f"{name}.layer_scalar"]


def gemma4_block_states(features, embeds, weights, num_layers, head_dim):
    """Return the normed states of a block of scaled embeddings, as :func:`block_states` does."""
    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], 1e-6)
    states = embeds
    seen = torch.ones(len(embeds), len(context) + len(embeds), dtype=torch.bool)
    for name in (f"layers.{index}" for index in range(num_layers)):
        x = rms_norm(states, weights[f"{name}.input_layernorm.weight"], 1e-6)
        sources = torch.cat((context, x))
        attended = gemma4_attention(x, sources, seen, weights, f"{name}.self_attn", head_dim)
        states = gemma4_rest(states, attended, weights, name)
    return rms_norm(states, weights["norm.weight"], 1e-6)


def gemma4_eagle3(embeds, hidden, weights, head_dim, cap):
    """Return logits and next hidden states, [num_tokens, hidden], of a Gemma 4 layer and scaled
    embeddings.
    """
    name = "layers.0"
    seen = torch.ones(len(embeds), len(embeds), dtype=torch.bool).tril()
    embeds = rms_norm(embeds, weights[f"{name}.input_layernorm.weight"], 1e-6)
    both = torch.cat(
        (embeds, rms_norm(hidden, weights[f"{name}.hidden_norm.weight"], 1e-6)), dim=-1
    )
    attended = gemma4_attention(both, both, seen, weights, f"{name}.self_attn", head_dim)
    hidden = gemma4_rest(hidden, attended, weights, name)
    logits = rms_norm(hidden, weights["norm.weight"], 1e-6) @ weights["lm_head.weight"].T
    return capped(logits, cap), hidden


def capped(logits, cap):
    return cap * torch.tanh(logits / cap) if cap else logits


def domino(
    path: list[int],
    hidden: torch.Tensor,
    embed: torch.Tensor,
    lm_head: torch.Tensor,
    weights: Weights,
    prefix: int,
) -> torch.Tensor:
    """Return the logits after a path from the root on.

    Args:
        path: ids of the target.
        hidden: [hidden], of the block token that predicts.
        embed: [vocab, hidden].
        lm_head: [vocab, hidden].
        weights: tensors of the GRU and of the projection.
        prefix: number of positions that are not corrected.
    """
    logits = lm_head @ hidden
    if len(path) <= prefix:
        return logits
    state = torch.zeros(weights["prefix_gru.weight_hh_l0"].shape[1])
    for token in path:
        reset, update, new = (weights["prefix_gru.weight_ih_l0"] @ embed[token]).chunk(3)
        own_reset, own_update, own_new = (weights["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        gate = (update + own_update).sigmoid()
        state = (1 - gate) * (new + (reset + own_reset).sigmoid() * own_new).tanh() + gate * state
    correction = weights["embed_proj.2.weight"] @ F.silu(
        weights["embed_proj.0.weight"] @ torch.cat((hidden, state))
    )
    return logits + correction


def dflash2(path, states, lm_head, weights, cap=0.0):
    """Return the logits after a path, as :func:`dspark` does: the best 4, scored by the token
    before.
    """
    logits = lm_head @ states[-1]
    logits = cap * torch.tanh(0.5 * logits / cap) if cap else logits
    best = logits.topk(4).indices
    selector = {name.removeprefix("candidate_selector."): own for name, own in weights.items()}
    context = selector["predecessor_codebook"][path[-1]] * (
        selector["hidden_projection.weight"] @ states[-1]
    )
    scored = torch.full_like(logits, -torch.inf)
    scored[best] = logits[best] + selector["successor_codebook"][best] @ context
    return scored, 1.0


def dspark(
    path: list[int], states: torch.Tensor, lm_head: torch.Tensor, weights: Weights, cap: float = 0.0
) -> tuple[torch.Tensor, float]:
    """Return the logits after a path from the root on, and the probability that a child is
    accepted.

    Args:
        path: ids of the target, one per block token.
        states: [len(path), hidden], of these block tokens.
        lm_head: [draft_vocab, hidden].
        weights: tensors of the Markov and confidence heads.
        cap: bound of the output layer's logits; 0: none.
    """
    embeds, state = (
        weights["markov_head.markov_w1.weight"],
        torch.zeros(weights["markov_head.markov_w1.weight"].shape[1]),
    )
    for token, hidden in zip(path, states, strict=True):
        latent = embed = embeds[token]
        if "markov_head.gate_proj.weight" in weights:
            latent = (
                linear(torch.cat((hidden, embed)), weights, "markov_head.gate_proj").sigmoid()
                * embed
            )
        if "markov_head.joint_proj.weight" in weights:
            joint = linear(torch.cat((state, embed, hidden)), weights, "markov_head.joint_proj")
            gate, candidate, output = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = output.tanh()
    bias = weights["markov_head.markov_w2.weight"] @ latent
    confidence = 1.0
    logits = capped(lm_head @ hidden, cap) + bias
    if (proj := weights.get("confidence_head.proj.weight")) is not None:
        features = torch.cat((hidden, embed))[: proj.shape[1]]
        confidence = float((proj[0] @ features + weights["confidence_head.proj.bias"]).sigmoid())
    return logits, confidence


def xpress(path, states, lm_head, weights):
    """Return the logits after a path, whose last token is read at the last position.

    Args:
        path: ids of the target, one per block token from the first on.
        states: [block, hidden], of all block tokens.
        lm_head: [draft_vocab, hidden].
        weights: tensors of the refiner.
    """
    head = {name.removeprefix("refiner_head."): own for name, own in weights.items()}
    num = len(path)
    hidden = states[:num]
    summary = states.mean(0).expand(num, -1)
    parts = (
        linear(hidden, head, "down_h"), linear(summary, head, "down_g"), head["token_embed.weight"][path]
    )  # fmt: skip
    x = linear(torch.cat(parts, dim=-1), head, "in_proj")
    mixer = (head["mix_l"] * torch.ones(head["mix_l"].shape[1:]).tril())[:, :num, :num]
    x = x + torch.einsum("ckj,jc->kc", mixer, x)
    inner = F.silu(linear(x, head, "mlp_gate")) * linear(x, head, "mlp_up")
    x = x + linear(inner, head, "mlp_down")
    return lm_head @ states[num - 1] + head["readout.weight"] @ x[-1]


def lilicorr(path, states, feature, embed, lm_head, weights):
    """Return the logits after a path from the root on, candidate by candidate.

    Args:
        path: ids below the root.
        states: [num_slots, hidden], of all mask tokens of the block.
        feature: [num_features], of the last context token.
        embed: [vocab, hidden].
        lm_head: [vocab, hidden].
        weights: tensors of the head.
    """
    own = {name.removeprefix("lilicorr."): each for name, each in weights.items()}
    eps = 1e-6
    best = (states @ lm_head.T).log_softmax(-1).topk(own["rank_embedding"].shape[3])
    num_slots, num = best.values.shape
    x = embed[best.indices]
    x = linear(x, own, "token_proj") if "token_proj.weight" in own else x
    x = x + linear(states, own, "pass_hidden_proj")[:, None]
    ranks = torch.arange(num).expand(num_slots, -1)
    logprobs = best.values
    described = (logprobs, logprobs.exp(), logprobs - logprobs.max(-1, keepdim=True).values)
    described = torch.stack((*described, ranks / (num - 1), (ranks == 0).float()), dim=-1)
    normed = F.layer_norm(described, (5,), own["feature_norm.weight"], own["feature_norm.bias"])
    x = x + linear(F.silu(linear(normed, own, "feature_mlp.up_proj")), own, "feature_mlp.down_proj")
    x = x + own["slot_embedding"][0, 0] + own["rank_embedding"][0, 0]
    x = x.flatten(0, 1)
    slots = torch.arange(num_slots).repeat_interleave(num)
    name = "layers.0"
    y = rms_norm(x, own[f"{name}.attn_norm.weight"], eps)
    qkv = F.linear(y, own[f"{name}.attn.in_proj_weight"], own[f"{name}.attn.in_proj_bias"])
    num_heads, center = len(own["same_slot_bias"]), own["relative_slot_bias"].shape[1] // 2
    q, k, v = (part.unflatten(-1, (num_heads, -1)) for part in qkv.chunk(3, dim=-1))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    for i, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(x))).tolist():
        distance = int(slots[i] - slots[j])
        scores[:, i, j] += own["relative_slot_bias"][:, distance + center]
        scores[:, i, j] += own["same_slot_bias"] * (distance == 0)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    x = x + linear(attended, own, f"{name}.attn.out_proj")
    y = rms_norm(x, own[f"{name}.mlp_norm.weight"], eps)
    x = x + linear(F.silu(linear(y, own, f"{name}.mlp.up_proj")), own, f"{name}.mlp.down_proj")
    x = rms_norm(x, own["output_norm.weight"], eps).unflatten(0, (num_slots, num))
    context = rms_norm(feature @ own["fc.weight"].T, own["hidden_norm.weight"], eps)
    anchor = rms_norm(linear(context, own, "context_proj"), own["anchor_norm.weight"], eps)
    both = torch.cat((x, anchor.expand_as(x), x * anchor), dim=-1)
    factors = F.silu(linear(both, own, "factor_input_proj"))
    slot = len(path)
    if slot:
        leaving = linear(
            factors[slot - 1][best.indices[slot - 1].tolist().index(path[-1])], own, "out_head"
        )
    else:
        leaving = linear(anchor, own, "anchor_out_head")
    entering = linear(factors[slot], own, "in_head")
    logits = torch.full((len(lm_head),), -torch.inf)
    logits[best.indices[slot]] = 3.0 * F.cosine_similarity(leaving[None], entering, dim=-1)
    return logits
