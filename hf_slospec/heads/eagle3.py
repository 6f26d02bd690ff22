"""EAGLE-3 and P-EAGLE networks: Llama or Qwen3 layers that read token embeddings and the combined
hidden states of several target layers.

``layouts.py`` reads their configs; ``head_drafter.py`` drafts with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_slospec.heads.head_drafter import PEagleDrafter
from hf_slospec.heads.mtp import DraftHead
from hf_slospec.model.properties import cache_option

# values of layer_types in transformers' configs
SLIDING = "sliding_attention"
FULL = "full_attention"
LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}  # by model_type


@dataclass(frozen=True)
class Eagle3Settings:
    """Settings of an EAGLE-3 head, besides the config of its layers."""

    # indices in the target's output_hidden_states of the hidden states to read
    feature_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False  # take the residual after hidden_norm, not before it
    norm_output: bool = False  # pass the hidden state to child nodes after the final norm
    norm_before_fc: bool = False  # apply one norm to the concatenated features, before fc
    fc_norm: bool = False  # apply one norm per target layer to its features, before fc
    fc_bias: bool = False


def widen_inputs(attention: nn.Module, size: int) -> None:
    """Replace q_proj, k_proj and v_proj so that they read two concatenated states of this size."""
    for name in ("q_proj", "k_proj", "v_proj"):
        if (plain := getattr(attention, name)) is not None:
            setattr(
                attention,
                name,
                nn.Linear(2 * size, plain.out_features, bias=plain.bias is not None),
            )


class Eagle3Layer(nn.Module):
    """First layer, whose attention reads an embedding and a hidden state, concatenated."""

    def __init__(self, config: LlamaConfig | Qwen3Config, norm_before_residual: bool):
        super().__init__()
        layer = LAYERS[config.model_type](config, 0)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = layer.self_attn
        widen_inputs(self.self_attn, size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = layer.mlp

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Return the hidden states before the final norm.

        Args:
            embeds: [batch, num_tokens, hidden].
            hidden: [batch, num_tokens, hidden].
            attention: further keyword arguments for the attention module.

        Returns:
            [batch, num_tokens, hidden].
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, _ = self.self_attn(
            torch.cat((self.input_layernorm(embeds), normed), dim=-1), **attention
        )
        hidden = residual + attended
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(DraftHead):
    """EAGLE-3 network with the parameter names of published checkpoints."""

    kind = "EAGLE-3 head"
    norm_class: ClassVar[Any] = LlamaRMSNorm
    rotary_class: ClassVar[Any] = LlamaRotaryEmbedding

    def __init__(
        self,
        config: LlamaConfig | Qwen3Config,
        settings: Eagle3Settings,
        embed_tokens: nn.Module | None = None,
        lm_head: nn.Module | None = None,
    ):
        """Make a network with random weights.

        Args:
            config: config of the layers; its ``vocab_size`` is the target's.
            settings: settings that the config has no fields for.
            embed_tokens: the target's embeddings to share; None: create embeddings for the head.
            lm_head: the target's lm_head to share; None: create one for the head.
        """
        super().__init__(config)
        size = config.hidden_size
        eps = config.rms_norm_eps
        num_features = len(settings.feature_layers)
        features_size = num_features * settings.target_hidden_size
        self.settings = settings
        self.feature_layers = settings.feature_layers
        self.target_hidden_size = settings.target_hidden_size
        self.draft_vocab_size = settings.draft_vocab_size
        self.embed_tokens = self._own_embeddings() if embed_tokens is None else embed_tokens
        if settings.norm_before_fc:
            self.input_norm = LlamaRMSNorm(features_size, eps=eps)
        if settings.fc_norm:
            norms = [
                LlamaRMSNorm(settings.target_hidden_size, eps=eps) for _ in range(num_features)
            ]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(features_size, size, bias=settings.fc_bias)
        self.midlayer = self._first_layer()
        # Layers after the first are plain decoder layers; checkpoints name them from layers.1 on.
        later = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict(
            {str(index): LAYERS[config.model_type](config, index) for index in later}
        )
        self.norm = self.norm_class(size, eps=eps)
        self.lm_head = (
            nn.Linear(size, settings.draft_vocab_size, bias=False) if lm_head is None else lm_head
        )
        self.rotary_emb = self.rotary_class(config)

    def _first_layer(self) -> nn.Module:
        config: Any = self.config
        return Eagle3Layer(config, self.settings.norm_before_residual)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        if self.settings.norm_before_fc:
            features = self.input_norm(features)
        if self.settings.fc_norm:
            parts = features.split(self.settings.target_hidden_size, dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        hidden: torch.Tensor = self.fc(features)
        return hidden

    @property
    def _kinds(self) -> list[str]:
        return list(
            getattr(self.config, "layer_types", None) or [FULL] * self.config.num_hidden_layers
        )

    def mask(self, **arguments: Any) -> Any:
        makers: dict[str, Any] = {
            FULL: create_causal_mask,
            SLIDING: create_sliding_window_causal_mask,
        }
        return {kind: makers[kind](**arguments) for kind in dict.fromkeys(self._kinds)}

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        attention_mask: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for index, kind in enumerate(self._kinds):
            options: dict[str, Any] = dict(
                position_embeddings=position_embeddings,
                attention_mask=attention_mask[kind],
                **cache_option(cache),
            )
            # Qwen3 layers read the sliding window from the config, Llama layers do not.
            if self.config.model_type == "llama":
                options["sliding_window"] = self.config.sliding_window if kind == SLIDING else None
            inputs = (hidden,) if index else (embeds, hidden)
            hidden = (self.layers[str(index)] if index else self.midlayer)(*inputs, **options)
        normed = self.norm(hidden)
        return normed, normed if self.settings.norm_output else hidden


class PEagleHead(Eagle3Head):
    """EAGLE-3 network that predicts several positions in one forward, by means of mask entries.

    Mask entries are appended to a request's last entry. Each takes the embedding of the mask token
    and a learned feature, and predicts the position after the one that the entry before it
    predicts.
    """

    kind = "P-EAGLE head"
    drafter_class = PEagleDrafter

    def __init__(self, *arguments: Any, mask_token_id: int, num_proposals: int):
        """Make a network with random weights.

        Args:
            arguments: positional arguments of :class:`Eagle3Head`.
            mask_token_id: id of the mask token in the target's vocabulary.
            num_proposals: maximum number of positions that one forward predicts.
        """
        super().__init__(*arguments)
        self.mask_token_id = mask_token_id
        self.num_proposals = self.min_nodes = num_proposals
        # [1, 1, num_features], in a ParameterDict, as loading assigns tensors to submodules only.
        self.mask_entry = nn.ParameterDict({"hidden": torch.empty(1, 1, self.fc.in_features)})

    def mask_inputs(self, num_entries: int) -> torch.Tensor:
        """Return the inputs of mask entries.  -> [num_entries, embedding + hidden]"""
        hidden: torch.Tensor = self.mask_entry["hidden"]
        token = torch.full((1,), self.mask_token_id, device=hidden.device)
        inputs = torch.cat((self.embed_tokens(token), self.combine(hidden[0])), dim=-1)
        return inputs.expand(num_entries, -1)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that a head reads if its config names none: of an early, a middle
    and a late layer.

    Returns:
        Indices in the target's ``output_hidden_states``.
    """
    return 2, num_layers // 2, num_layers - 3
