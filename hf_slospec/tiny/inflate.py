"""Function-preserving inflation: a model of larger size with the same outputs.

Additional hidden channels are exactly zero; additional heads, MLP neurons and layers contribute exactly zero. They are
computed like all others, so that texts and acceptance are real while time and memory are those of the larger shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Shape(NamedTuple):
    """Size of an inflated Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int


# Hidden sizes are 4**n times the embedded target's 256, which makes the scaling of norms exact in any float format.
SHAPES = {
    "0.1B": Shape(1024, 3072, 8),
    "0.3B": Shape(1024, 5120, 16),
    "0.6B": Shape(1024, 7168, 24),
    "1B": Shape(1024, 11008, 28),
    "8B": Shape(4096, 14336, 36),
}


@torch.no_grad()
def inflate(model: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Return a larger model with the logits of ``model``, up to the rounding of longer sums.

    Args:
        model: a Llama without biases.
        shape: the new size, no dimension smaller than before. The number of heads is scaled with the hidden size.
        seed: of the random weights that do not affect the output.

    Raises:
        ValueError: the shape is smaller than the model, or not a multiple of its hidden size; the model has biases.
    """
    old: Any = model.config
    if old.attention_bias or old.mlp_bias:
        raise ValueError("a model with biases cannot be inflated; use one without attention and MLP biases")
    factor, remainder = divmod(shape.hidden_size, old.hidden_size)
    if (
        remainder
        or factor < 1
        or shape.intermediate_size < old.intermediate_size
        or shape.num_layers < old.num_hidden_layers
    ):
        raise ValueError(
            f"{shape} cannot hold this model: it must have a multiple of hidden size {old.hidden_size}, at least "
            f"{old.intermediate_size} MLP neurons and at least {old.num_hidden_layers} layers"
        )
    config = LlamaConfig(**old.to_dict() | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": old.num_attention_heads * factor,
        "num_key_value_heads": old.num_key_value_heads * factor,
        "head_dim": old.head_dim,
        # The mean square is smaller by the factor, because most channels are zero; so epsilon must be, too.
        "rms_norm_eps": old.rms_norm_eps / factor,
    })  # fmt: skip
    with torch.device(model.device):
        larger: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=model.dtype).eval()
    generator = torch.Generator(model.device).manual_seed(seed)
    sources = dict(model.named_parameters())
    for name, parameter in larger.named_parameters():
        _fill(name, parameter, sources.get(name), factor, generator)
    larger.generation_config = model.generation_config
    return larger


def _fill(
    name: str, parameter: torch.Tensor, source: torch.Tensor | None, factor: int, generator: torch.Generator
) -> None:
    """Copy the old weights; set weights that write to hidden channels to zero, and unused weights to random values."""
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
