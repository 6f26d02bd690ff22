"""Tiny random models of many families, and the stock-against-ours comparison they are put through."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB, POSITIONS = 101, 160
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=POSITIONS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GROUPED = SMALL | dict(num_key_value_heads=2)
WINDOW = 9  # shorter than every prompt and output of the tests
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2-window": (
        "Qwen2Config",
        GROUPED | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", GROUPED | dict(head_dim=8)),
    "mistral": ("MistralConfig", GROUPED | dict(sliding_window=None)),
    "mistral-window": ("MistralConfig", GROUPED | dict(sliding_window=WINDOW)),
    "mixtral": ("MixtralConfig", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3Config", GROUPED),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "gpt2": (
        "GPT2Config",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=1, eos_token_id=2),
    ),
    "opt": ("OPTConfig", SMALL | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "gemma2": ("Gemma2Config", GROUPED | dict(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8)),
    "gemma3": ("Gemma3TextConfig", GROUPED | dict(head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8,
                                                  layer_types=["sliding_attention", "full_attention"])),
    "gpt-oss": (
        "GptOssConfig",
        GROUPED | dict(head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ),
}  # fmt: skip


@functools.cache
def tiny_model(family: str, seed: int = 0, noise: float = 0.0) -> PreTrainedModel:
    """A random model with sharp, uneven predictions; with ``noise`` a draft that agrees with it only sometimes."""
    name, settings = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
        parameter.data.add_(noise * torch.randn_like(parameter))
    return model


def ragged_prompts(batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths (12 to 24 tokens), as a tokenizer would return them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 25, (batch,), generator=generator).tolist()
    longest = max(lengths)
    input_ids = torch.randint(3, VOCAB, (batch, longest), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, : longest - length] = 0
        attention_mask[row, : longest - length] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def assert_same_as_stock(model: PreTrainedModel, generate: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Stock and ours on the same inputs and seed: equal tokens, and the global generator left in the same state."""
    torch.manual_seed(7)
    stock = type(model).generate(model, **inputs, **options)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    ours = generate(**inputs, **options, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, stock)
    assert torch.equal(torch.get_rng_state(), state)
    return ours
