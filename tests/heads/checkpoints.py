"""Small targets, and random checkpoints of drafting heads for them in every published layout."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen3NextConfig,
)

from hf_slospec.heads.eagle3 import Eagle3Head, Eagle3Settings
from hf_slospec.heads.mtp import MtpHead, own_modules
from tests.support.toys.tiny_models import GROUPED, POSITIONS, VOCAB

HIDDEN = 32
DRAFT_VOCAB = 40
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
CONFIGS = {
    "llama": LlamaConfig(**GROUPED | dict(num_hidden_layers=8)),
    "qwen3-next": Qwen3NextConfig(
        **GROUPED | dict(num_hidden_layers=4, head_dim=16),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    # Transformers knows the MTP layers of released checkpoints by their numbers, such as 46
    "glm4-moe": Glm4MoeConfig(
        **GROUPED
        | dict(
            num_hidden_layers=46, head_dim=8, first_k_dense_replace=46, num_nextn_predict_layers=1
        ),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
}


@functools.cache
def target_of(family):
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    model.eval()
    return model


def eagle3_fields(**changes):
    """Fields of the layer's config, as checkpoints have them."""
    fields = dict(
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=False,
    )
    return fields | changes


def random_tensors(shapes, seed=5):
    """Random tensors of these shapes, large enough that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=generator)
        * (0.5 if len(shape) < 2 else 2 / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }


def vocabulary_maps(draft_vocab):
    """Return the tensors d2t and t2d of a reduced vocabulary."""
    ids = (
        torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:draft_vocab]
        .sort()
        .values
    )
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": t2d}


def spread(head, target, seed):
    """Random tensors of a head's own modules."""
    state = own_modules(head, target).state_dict()
    return random_tensors({name: tensor.shape for name, tensor in state.items()}, seed)


def eagle3_tensors(flags, draft_vocab=DRAFT_VOCAB, **changes):
    """Tensors of a random EAGLE-3 head under the names of SafeAILab's checkpoints."""
    target = target_of("llama")
    config = LlamaConfig.from_dict(eagle3_fields(**changes))
    settings = Eagle3Settings((2, 4, 5), HIDDEN, draft_vocab, **dict.fromkeys(flags, True))
    tensors = spread(Eagle3Head(config, settings, target.get_input_embeddings()), target, seed=1)
    return tensors | (vocabulary_maps(draft_vocab) if draft_vocab < VOCAB else {})


def mtp_tensors(family):
    """Tensors of a random MTP layer under their published names, less the prefix."""
    target = target_of(family)
    return with_single_experts(spread(MtpHead(target), target, seed=3))


def with_single_experts(tensors):
    """Return tensors with one weight per expert, as checkpoints have them."""
    single = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        for index, own in enumerate(tensor if layer.endswith(".experts") else ()):
            weights = own.chunk(2) if part == "gate_up_proj" else (own,)
            for short, weight in zip(part.removesuffix("_proj").split("_"), weights, strict=True):
                single[f"{layer}.{index}.{short}_proj.weight"] = weight.clone()
        if not layer.endswith(".experts"):
            single[name] = tensor
    return single


def write(folder, config, tensors):
    """Write a checkpoint and return its path."""
    folder.mkdir(exist_ok=True)
    fields = config if isinstance(config, dict) else config.to_dict()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return str(folder)


def published_config(**changes):
    """Return the config.json of SafeAILab and SpecForge."""
    return (
        eagle3_fields()
        | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFT_VOCAB)
        | changes
    )


def speculators_config(**changes):
    """Return the config.json of speculators."""
    return (
        dict(
            architectures=["Eagle3Speculator"],
            speculators_model_type="eagle3",
            transformer_layer_config=eagle3_fields(),
            draft_vocab_size=DRAFT_VOCAB,
            speculators_config={"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        )
        | changes
    )
