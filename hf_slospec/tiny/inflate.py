"""Function-preserving inflation: the same outputs at the cost of a larger model.

Extra hidden channels carry exactly zero, extra heads, MLP neurons and layers contribute exactly zero. What is added is
multiplied like everything else, so text and acceptance stay real while time and memory are those of the larger shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Shape(NamedTuple):
    """Size of an inflated Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int


# Hidden sizes are 4**n times the embedded target's 256, where rescaling the norms is exact in any float format.
SHAPES = {
    "0.1B": Shape(1024, 3072, 8),
    "0.3B": Shape(1024, 5120, 16),
    "0.6B": Shape(1024, 7168, 24),
    "1B": Shape(1024, 11008, 28),
    "8B": Shape(4096, 14336, 36),
}


@torch.no_grad()
def inflate(model: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """A larger model with the logits of ``model``, up to the rounding of longer sums.

    Args:
        model: a Llama without biases.
        shape: its new size, nowhere smaller than the old one. Heads grow in proportion to the hidden size.
        seed: of the random weights that fill what cannot influence the output.

    Raises:
        ValueError: the shape is smaller than the model, or not a multiple of its hidden size; the model has biases.
    """
    old = model.config
    if old.attention_bias or old.mlp_bias:
        raise ValueError("a model with biases cannot be inflated")
    factor, remainder = divmod(shape.hidden_size, old.hidden_size)
    if (
        remainder
        or factor < 1
        or shape.intermediate_size < old.intermediate_size
        or shape.num_layers < old.num_hidden_layers
    ):
        raise ValueError(
            f"{shape} does not hold this model: it needs a multiple of hidden size {old.hidden_size}, at least "
            f"{old.intermediate_size} MLP neurons and at least {old.num_hidden_layers} layers"
        )
    config = LlamaConfig(**old.to_dict() | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": old.num_attention_heads * factor,
        "num_key_value_heads": old.num_key_value_heads * factor,
        "head_dim": old.head_dim,
        # The mean square over mostly-zero channels is smaller by the factor; so must be what is added to it.
        "rms_norm_eps": old.rms_norm_eps / factor,
    })  # fmt: skip
    with torch.device(model.device):
        larger = LlamaForCausalLM._from_config(config, dtype=model.dtype).eval()
    generator = torch.Generator(model.device).manual_seed(seed)
    sources = dict(model.named_parameters())
    for name, parameter in larger.named_parameters():
        _fill(name, parameter, sources.get(name), factor, generator)
    larger.generation_config = model.generation_config
    return larger


def _fill(
    name: str, parameter: torch.Tensor, source: torch.Tensor | None, factor: int, generator: torch.Generator
) -> None:
    """Put the old weights in the corner; zero whatever writes to hidden channels; the rest is read by nothing."""
    writes_hidden = name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight"))
    if name.endswith("norm.weight"):
        parameter.fill_(factor**-0.5)
    elif writes_hidden:
        parameter.zero_()
    else:
        parameter.normal_(0.0, 0.02, generator=generator)
    if source is not None:
        scale = factor**-0.5 if name.endswith("norm.weight") else 1.0
        parameter[tuple(slice(size) for size in source.shape)] = source * scale
