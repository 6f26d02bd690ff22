"""Base of heads that draft token by token (EAGLE-3, MTP), and multi-token prediction (MTP) layers,
which were trained with the target.

``loading.py`` loads MTP layers, ``head_drafter.py`` drafts with these heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from hf_slospec.drafters.head import Head
from hf_slospec.heads.head_drafter import HeadDrafter
from hf_slospec.model.properties import cache_option


class DraftHead(Head):
    """Head that drafts token by token.

    The head processes entries, each of which has a slot in its K/V cache. Entry i takes the
    target's hidden state (feature) of token i and the embedding of token i + 1, and predicts token
    i + 2. A draft node's entry would need the feature of its parent, which is not known yet; the
    hidden state that the head returned for the parent's entry takes its place."""

    drafter_class = HeadDrafter

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that the head takes as input and returns for each entry."""
        return int(self.config.hidden_size)

    @property
    def packed_input_size(self) -> int:
        """Size of one entry's input, which packed forwards take in place of a token id: an
        embedding and a hidden state, concatenated.
        """
        weight: Any = self.embed_tokens.weight
        return int(weight.shape[-1]) + self.hidden_size

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        attention_mask: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head's layers.

        Args:
            embeds: [1, num_tokens, embedding].
            hidden: [1, num_tokens, hidden]: combined features, or hidden states that the head
                returned for the entries of the parent nodes.
            position_ids: [1, num_tokens] int64.
            cache: cache that the layers update; None: entries attend to each other only.
            attention_mask: from :meth:`mask`.

        Returns:
            Input of :meth:`logits`, and the hidden states that entries of child nodes take, both
            [1, num_tokens, hidden].
        """
        raise NotImplementedError

    def mask(self, **arguments: Any) -> Any:
        """Return the attention mask for the layers, as transformers' ``create_causal_mask`` does.

        None means causal attention where the attention implementation needs no mask for it.

        Args:
            arguments: keyword arguments of ``create_causal_mask``.
        """
        return create_causal_mask(**arguments)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the head's (possibly reduced) vocabulary.

        [1, num_rows, hidden] -> [1, num_rows, draft_vocab]
        """
        logits: torch.Tensor = self.lm_head(states)
        return logits

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """Compute the logits and hidden states of entries.

        Args:
            input_ids: [1, num_tokens] int64; only trials and measurements pass ids, whose
                embeddings then also serve as hidden states.
            attention_mask: 2D padding mask, or 4D mask [1, 1, num_tokens, num_keys]; None: causal.
            position_ids: [1, num_tokens] int64; required.
            cache: cache that the layers update; None: entries attend to each other only.
            inputs_embeds: [1, num_tokens, embedding + hidden]: embeddings and hidden states,
                concatenated.
            logits_to_keep: [num_rows] int64, indices of the entries whose outputs to return; 0:
                all.

        Returns:
            ``logits`` [1, num_rows, draft_vocab + hidden]: logits and the hidden states that
            entries of child nodes take, concatenated.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            embeds = self.embed_tokens(input_ids)
            hidden = embeds[
                ..., torch.arange(self.hidden_size, device=embeds.device) % embeds.shape[-1]
            ]
        else:
            embeds = inputs_embeds[..., : -self.hidden_size]
            hidden = inputs_embeds[..., -self.hidden_size :]
        assert position_ids is not None
        mask = self.mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            **cache_option(cache),
            position_ids=position_ids,
        )
        states, next_hidden = self.run(embeds, hidden, position_ids, cache, mask)
        rows = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(
            logits=torch.cat((self.logits(states[:, rows]), next_hidden[:, rows]), dim=-1)
        )


def own_modules(head: nn.Module, target: PreTrainedModel) -> nn.ModuleDict:
    """Return the head's direct submodules by name, except modules that belong to the target."""
    shared = {id(module) for module in target.modules()}
    return nn.ModuleDict(
        {name: module for name, module in head.named_children() if id(module) not in shared}
    )


class _TargetLayerHead(DraftHead):
    """Base of MTP heads, which read the target's last hidden state (after the final norm)."""

    kind = "MTP layer"
    # transformers raises an error for a head that does not support the attention and experts
    # implementations in its config, which is copied from the target's.
    _supports_flash_attn = True
    _supports_flex_attn = True

    def __init__(self, target: PreTrainedModel, config: Any):
        super().__init__(config)
        decoder: Any = target.get_decoder()
        self.feature_layers = (len(decoder.layers),)
        self.target_hidden_size = self.hidden_size
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
    """MTP layer with the parameter names of Qwen3-Next and Qwen3.5, without the prefix ``mtp.``.

    It shares the target's embeddings, rotary embedding and lm_head.
    """

    def __init__(self, target: PreTrainedModel):
        """Build the layer with random weights from the target's decoder layer and norm classes."""
        super().__init__(target, _config_of_layer(target))
        decoder: Any = target.get_decoder()
        size = self.config.hidden_size
        eps = self.config.rms_norm_eps
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
        hidden = self.fc(
            torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), dim=-1)
        )
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
    """MTP layers loaded by transformers' ``MtpModel``; the first one drafts every tree level."""

    def __init__(self, target: PreTrainedModel, mtp: MtpModel):
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
        return self.mtp._project_to_logits(states)


def _config_of_layer(target: PreTrainedModel) -> Any:
    """Return a copy of the target's config for a single layer: with full attention, and with the
    MLP type of the target's last layer or, where ``mlp_only_layers`` decides, with experts.
    """
    config: Any = copy.deepcopy(target.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
        config.decoder_sparse_step = 1
    return config
