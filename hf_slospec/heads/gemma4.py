"""DFlash, DSpark and EAGLE-3 networks with Gemma 4 layers, as published by DeepSpec.

Gemma 4 assistant models are in ``shared_kv.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)

from hf_slospec.drafters.head import Head
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.checkpoint import read_config
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.heads.dspark import DSparkHead
from hf_slospec.heads.eagle3 import FULL, Eagle3Head, widen_inputs

# Values of model_type in the configs of these heads, copied from their targets' configs.
MODEL_TYPES = (
    "gemma4_text",
    "gemma4_unified_text",
)
# Config fields that must be absent or 0: DeepSpec makes no heads with these features.
UNSUPPORTED = ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers")


def config_of_gemma4(source: str, fields: Mapping[str, Any]) -> Any:
    """Make a :class:`Gemma4TextConfig` from the config fields of a head.

    Raises:
        UnsupportedModelError: the fields are invalid, or set a feature in ``UNSUPPORTED``.
    """
    for name in UNSUPPORTED:
        if fields.get(name):
            raise UnsupportedModelError(
                f"{source} has {name} {fields[name]!r}; its layers must be dense and whole"
            )
    # The fields were copied from the target's config, but all layers of these heads use full
    # attention and none has per-layer inputs, which the config class would enable by default.
    num_layers = fields.get("num_hidden_layers")
    layers = [FULL] * num_layers if isinstance(num_layers, int) else None
    overrides = {"layer_types": layers, "hidden_size_per_layer_input": 0}
    copied = {name: value for name, value in fields.items() if name != "model_type"}
    config = read_config(source, Gemma4TextConfig, copied | overrides)
    rope = config.rope_parameters.get(FULL) or {}
    if (kind := rope.get("rope_type")) not in ("default", *ROPE_INIT_FUNCTIONS):
        raise UnsupportedModelError(
            f"{source} has rotary embeddings of unknown type {kind!r} in its layers of Gemma 4"
        )
    return config


class FullRotaryEmbedding(Gemma4TextRotaryEmbedding):
    """Gemma 4's rotary embeddings for full-attention layers, with the call signature of Qwen3's."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [batch, num_tokens, head_dim] each."""
        cosines, sines = super().forward(x, position_ids, FULL)
        return cosines, sines


class Gemma4Head(Head):
    """Base of heads with layers of Gemma 4."""

    norm_class = Gemma4RMSNorm
    rotary_class = FullRotaryEmbedding

    def _own_embeddings(self) -> nn.Module:
        """Return an embedding module that multiplies by the square root of the hidden size."""
        size = self.config.hidden_size
        padding: Any = None  # padding_idx, which forwards do not read
        return Gemma4TextScaledWordEmbedding(self.config.vocab_size, size, padding, size**0.5)


class Gemma4DFlashHead(Gemma4Head, DFlashHead):
    """DFlash network with Gemma 4 layers.

    A layer without v_proj uses the output of k_proj, before norm and rotary embedding, as values.
    """

    config_class = Gemma4TextConfig
    layer_class = Gemma4TextDecoderLayer
    default_embedding_scale = None

    def keys_and_values(
        self, attention: Any, combined: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = attention.k_proj(combined).unflatten(-1, (-1, attention.head_dim))
        values = keys
        if attention.v_proj is not None:
            values = attention.v_proj(combined).unflatten(-1, (-1, attention.head_dim))
        return attention.k_norm(keys), attention.v_norm(values)

    def layer_options(self, input_ids: torch.Tensor) -> dict[str, Any]:
        # Gemma 4 layers write their K and V to this argument for layers that share them; no layer
        # of a head does.
        return {"shared_kv_states": {}}


class Gemma4DSparkHead(Gemma4DFlashHead, DSparkHead):
    """DSpark network with Gemma 4 layers."""


BLOCKS: dict[type[DFlashHead], type[DFlashHead]] = {
    DFlashHead: Gemma4DFlashHead,
    DSparkHead: Gemma4DSparkHead,
}


class Gemma4Eagle3Layer(Gemma4TextDecoderLayer):
    """Gemma 4 decoder layer whose attention reads an embedding and a hidden state, concatenated."""

    def __init__(self, config: Any):
        super().__init__(config, 0)
        self.hidden_norm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        widen_inputs(self.self_attn, config.hidden_size)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Return the hidden states before the final norm, [batch, num_tokens, hidden]; see
        :class:`Eagle3Layer`.
        """
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        attended, _ = self.self_attn(both, shared_kv_states={}, **attention)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        output: torch.Tensor = (hidden + self.post_feedforward_layernorm(fed)) * self.layer_scalar
        return output


class Gemma4Eagle3Head(Gemma4Head, Eagle3Head):
    """EAGLE-3 network with one Gemma 4 layer."""

    def _first_layer(self) -> nn.Module:
        return Gemma4Eagle3Layer(self.config)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = super().logits(states)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
