"""Multi-token prediction (MTP) layers: decoder layers that were trained with the target, applied level by level."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_slospec.drafters.heads.head import DraftHead
from hf_slospec.models.inspection.cache_names import cache_option


class _TargetLayerHead(DraftHead):
    """Head with a layer of the target's class, which reads the target's last hidden state, after the final norm."""

    kind = "MTP layer"
    # The head gets the implementations of attention and experts that the target was loaded with.
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, target: PreTrainedModel, config: Any):
        super().__init__(config)
        decoder: Any = target.get_decoder()
        self.feature_layers = (len(decoder.layers),)
        self.target_ids = None
        self.embed_tokens: Any = target.get_input_embeddings()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features


class MtpHead(_TargetLayerHead):
    """MTP layer with the parameter names of Qwen3-Next and Qwen3.5, without their prefix ``mtp.``.

    Embeddings, rotary embedding and output head are the target's.
    """

    def __init__(self, target: PreTrainedModel):
        """Make a layer with random weights, of the target's own classes."""
        super().__init__(target, _config_of_layer(target))
        decoder: Any = target.get_decoder()
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        norm_class = type(decoder.norm)
        self.rotary_emb = decoder.rotary_emb
        self.lm_head: Any = target.get_output_embeddings()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = norm_class(size, eps=eps)
        self.pre_fc_norm_hidden = norm_class(size, eps=eps)
        self.layers = nn.ModuleList([type(decoder.layers[-1])(self.config, 0)])
        self.norm = norm_class(size, eps=eps)

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), dim=-1))
        hidden = self.layers[0](
            hidden,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_option(cache),
        )
        hidden = self.norm(hidden)
        return hidden, hidden


class ShippedMtpHead(_TargetLayerHead):
    """The first MTP layer of those that transformers loads with the target, applied at every level."""

    def __init__(self, target: PreTrainedModel, mtp: MtpModel):
        """Take the MTP layers of a target."""
        super().__init__(target, mtp.config)
        self.mtp = mtp

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.mtp.layers[0](
            embeds,
            hidden,
            position_embeddings=self._position_embeddings(embeds, position_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_option(cache),
        )
        if self.mtp.use_shared_post_norm:
            hidden = self.mtp.shared_post_norm(hidden)
        return hidden, hidden

    def _position_embeddings(self, embeds: torch.Tensor, position_ids: torch.Tensor) -> Any:
        rotary_emb: Any = self.mtp.rotary_emb
        if rotary_emb is None:
            return None
        by_type = {"layer_type": self.config.layer_types[0]} if self.mtp.has_per_layer_rope else {}
        return rotary_emb(embeds, position_ids=position_ids, **by_type)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.mtp._project_to_logits(states)
        return logits


def _config_of_layer(target: PreTrainedModel) -> Any:
    """Return the target's config for a model of one layer, with full attention and, if the target has any, experts."""
    config: Any = copy.deepcopy(target.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
    return config
