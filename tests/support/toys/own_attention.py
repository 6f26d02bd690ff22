"""A model with attention, a cache call and masks of its own, as code beside a checkpoint has them."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.support.toys.tiny_models import VOCAB, sharpened


class _Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        size = config.hidden_size
        self.index = index
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, hidden, mask, cache, rotary):
        parts = self.qkv(hidden).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        key, value = cache.update(key, value, self.index)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]) + mask
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class OwnAttention(PreTrainedModel, GenerationMixin):
    """``attention_mask`` is one of padding, [batch, num_keys], or a whole one of four dimensions,
    which is added to scores.
    """

    config_class = LlamaConfig
    per_token = True  # each token is computed alone, see docs/own_models.md
    reads_whole_masks = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Attention(config, index) for index in range(config.num_hidden_layers)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, cache=None,
        use_cache=True, return_dict=True, **_,
    ):  # fmt: skip
        hidden = self.embed(input_ids)
        cached = past_key_values or cache
        cached = DynamicCache() if cached is None else cached
        length = hidden.shape[1]
        num_keys = cached.get_seq_length() + length
        mask = attention_mask
        if mask is None or mask.dim() == 2 or not self.reads_whole_masks:
            seen = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
            if mask is not None and mask.dim() == 2:
                seen = seen & mask[:, None, None].bool()
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(hidden.dtype).min)
        if position_ids is None:
            position_ids = torch.arange(num_keys - length, num_keys)[None]
        rotary = self.rotary(hidden, position_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask, cached, rotary)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden), past_key_values=cached)


def own_attention_model(model_class=OwnAttention, **settings):
    """Return a tiny model of random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, pad_token_id=0,
        eos_token_id=None, bos_token_id=None, **settings,
    )  # fmt: skip
    return sharpened(lambda: model_class(config), 0)
