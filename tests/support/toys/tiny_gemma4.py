"""Tiny random Gemma 4 models and assistants that attend to their K/V."""

from __future__ import annotations

import functools

import torch
import transformers

from hf_slospec.model.loading import assistants_can_be_built
from tests.support.toys.tiny_models import GROUPED, WINDOW, sharpened

KINDS = ["sliding_attention", "full_attention"]
SHARED = dict(num_kv_shared_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=101)
# Released models have per-layer inputs and shared K/V (E2B, E4B), or K that are V and other numbers
# of heads (31B).
TARGETS = {
    "shared": SHARED,
    "own": dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
}


def text_config(unified=False, **settings):
    name = "Gemma4UnifiedTextConfig" if unified else "Gemma4TextConfig"
    own = GROUPED | dict(head_dim=8, global_head_dim=16, sliding_window=WINDOW, num_hidden_layers=4)
    return getattr(transformers, name)(**own | dict(layer_types=KINDS * 2) | settings)


@functools.cache
def tiny_target(variant="shared", multimodal=False, unified=False):
    prefix = "Gemma4Unified" if unified else "Gemma4"
    settings = {} if unified else TARGETS[variant]
    if not multimodal:
        causal = getattr(transformers, f"{prefix}ForCausalLM")
        return sharpened(lambda: causal(text_config(unified, **settings)), 0)
    config = transformers.Gemma4Config(
        text_config=text_config(**settings), vision_config=None, audio_config=None
    )
    return sharpened(lambda: transformers.Gemma4ForConditionalGeneration(config), 0)


def tiny_assistant(
    variant="shared", ordered=False, unified=False, backbone_hidden_size=32, **settings
):
    """An assistant of two sliding layers and a full one; ``ordered``: its logits are those of a few
    clusters.
    """
    prefix = "Gemma4Unified" if unified else "Gemma4"
    own = {} if unified or variant == "shared" else dict(TARGETS[variant])
    own |= dict(
        hidden_size=24,
        num_hidden_layers=3,
        layer_types=["sliding_attention", *KINDS],
        num_kv_shared_layers=3,
    )
    if not unified:
        own |= dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    of_assistant = dict(backbone_hidden_size=backbone_hidden_size, use_ordered_embeddings=ordered)
    if ordered:
        own["vocab_size"] = 100  # as many tokens for each cluster
        of_assistant |= dict(num_centroids=20, centroid_intermediate_top_k=6)
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=text_config(unified, **own | settings), **of_assistant
    )
    with assistants_can_be_built():
        model = sharpened(lambda: getattr(transformers, f"{prefix}AssistantForCausalLM")(config), 0)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(100))
    return model
