"""Function-preserving inflation: a model of larger size with the same outputs.

Additional hidden channels are exactly zero; additional heads, MLP neurons and layers contribute exactly zero. They are
computed like all others, so that texts and acceptance are real while time and memory are those of the larger shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec.models.heads.eagle3 import Eagle3Head
from hf_slospec.models.heads.head import own_modules
from hf_slospec.models.heads.mtp import MtpHead

Head = TypeVar("Head", Eagle3Head, MtpHead)


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
    _fill(larger, model, old.hidden_size, factor, seed)
    larger.generation_config = model.generation_config
    return larger


@torch.no_grad()
def inflate_head(head: Head, plain: LlamaForCausalLM, target: LlamaForCausalLM, seed: int = 0) -> Head:
    """Return a larger head that drafts for an inflated target what ``head`` drafts for the plain one.

    Args:
        head: an EAGLE-3 head or MTP layer of ``plain``.
        plain: the model before :func:`inflate`.
        target: the inflated model.
        seed: of the random weights that do not affect the output.
    """
    size, factor = plain.config.hidden_size, target.config.hidden_size // plain.config.hidden_size
    larger: Any
    with torch.device(target.device):
        if isinstance(head, Eagle3Head):
            old: Any = head.config
            config = LlamaConfig(**old.to_dict() | {
                "hidden_size": target.config.hidden_size,
                "intermediate_size": max(old.intermediate_size, target.config.intermediate_size),
                "num_attention_heads": old.num_attention_heads * factor,
                "num_key_value_heads": old.num_key_value_heads * factor,
                "rms_norm_eps": old.rms_norm_eps / factor,
            })  # fmt: skip
            settings = replace(head.settings, target_hidden_size=target.config.hidden_size)
            larger = Eagle3Head(config, settings, target.get_input_embeddings())
            if head.target_ids is not None:
                larger.set_vocabulary(head.target_ids)
        else:
            larger = MtpHead(target)
    larger.to(target.dtype).eval()
    _fill(own_modules(larger, target), own_modules(head, plain), size, factor, seed)
    inflated: Head = larger
    return inflated


def _fill(larger: torch.nn.Module, source: torch.nn.Module, hidden_size: int, factor: int, seed: int) -> None:
    """Set the weights of a larger model from those of one with this hidden size."""
    sources = dict(source.named_parameters())
    generators = dict[torch.device, torch.Generator]()
    for name, parameter in larger.named_parameters():
        generator = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(seed))
        _fill_weight(name, parameter, sources.get(name), hidden_size, factor, generator)


def _fill_weight(
    name: str,
    parameter: torch.Tensor,
    source: torch.Tensor | None,
    hidden_size: int,
    factor: int,
    generator: torch.Generator,
) -> None:
    """Copy the old weights; set weights that write to hidden channels to zero, and unused weights to random values."""
    module = name.rpartition(".")[0]
    writes_hidden = module.endswith(("o_proj", "down_proj", "embed_tokens", "fc"))
    reads_hidden = not name.endswith("bias") and not module.endswith(("o_proj", "down_proj"))
    if "norm" in name:
        parameter.fill_(factor**-0.5)
    elif writes_hidden:
        parameter.zero_()
    else:
        parameter.normal_(0.0, 0.02, generator=generator)
    if source is None:
        return
    scale = factor**-0.5 if "norm" in name else 1.0
    if reads_hidden:  # one or more of them, side by side
        rows = [slice(size) for size in source.shape[:-1]]
        for begin in range(0, source.shape[-1], hidden_size):
            columns = slice(begin * factor, begin * factor + hidden_size)
            parameter[*rows, columns] = source[..., begin : begin + hidden_size] * scale
    else:
        parameter[tuple(slice(size) for size in source.shape)] = source * scale
