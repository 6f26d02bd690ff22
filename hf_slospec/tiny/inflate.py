"""Function-preserving inflation: a model of larger size with the same outputs.

Additional hidden channels are exactly zero; additional heads, MLP neurons and layers contribute exactly zero, and
additional ids never win. They are computed like all others, so that texts and acceptance are real while time and
memory are those of the larger shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec.drafters.heads.eagle3 import Eagle3Head
from hf_slospec.drafters.heads.head import own_modules
from hf_slospec.drafters.heads.mtp import MtpHead
from hf_slospec.errors import InvalidInputError
from hf_slospec.tiny.placement import Placement
from hf_slospec.tiny.shapes import Shape

Head = TypeVar("Head", Eagle3Head, MtpHead)


@torch.no_grad()
def inflate(model: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Return a larger model with the logits of ``model``, up to the rounding of longer sums.

    Larger heads also round their queries, which are scaled by the square root of the ratio of head sizes. Additional
    ids have logits below -100.

    Args:
        model: a Llama without biases, with plain rotary embeddings.
        shape: the new size; no dimension may be smaller than before.
        seed: seed of the random weights, which do not affect the output.

    Raises:
        InvalidInputError: the shape is smaller than the model, or not a multiple of its hidden and head sizes; it has
            additional ids for a model in fp16; or the model has biases.
    """
    config = config_of(model, shape)
    with torch.device(model.device):
        larger: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=model.dtype).eval()
    _fill(larger, model, Placement.of(model.config, config), seed)
    larger.generation_config = model.generation_config
    return larger


def config_of(model: LlamaForCausalLM, shape: Shape) -> LlamaConfig:
    """Return the config of an inflated model; raises as :func:`inflate` does."""
    old: Any = model.config
    if old.attention_bias or old.mlp_bias:
        raise InvalidInputError("a model with biases cannot be inflated; use one without attention and MLP biases")
    factor = max(shape.hidden_size // old.hidden_size, 1)
    is_tied = old.tie_word_embeddings if shape.tie_word_embeddings is None else shape.tie_word_embeddings
    shape = shape._replace(
        num_heads=shape.num_heads or old.num_attention_heads * factor,
        num_kv_heads=shape.num_kv_heads or old.num_key_value_heads * factor,
        head_dim=shape.head_dim or old.head_dim, vocab_size=shape.vocab_size or old.vocab_size,
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    _check_holds(shape, old, model.dtype)
    return LlamaConfig(**old.to_dict() | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        # The additional channels are zero, so the mean square is smaller by the factor, and epsilon must be, too.
        "rms_norm_eps": old.rms_norm_eps / factor,
    })  # fmt: skip


@torch.no_grad()
def inflate_head(head: Head, plain: LlamaForCausalLM, target: LlamaForCausalLM, seed: int = 0) -> Head:
    """Return a larger head that drafts for an inflated target what ``head`` drafts for the plain one.

    Args:
        head: an EAGLE-3 head or MTP layer of ``plain``.
        plain: the model before :func:`inflate`.
        target: the inflated model.
        seed: seed of the random weights, which do not affect the output.
    """
    factor = target.config.hidden_size // plain.config.hidden_size
    larger: Any
    old: Any = head.config
    with torch.device(target.device):
        if isinstance(head, Eagle3Head):
            config = LlamaConfig(**old.to_dict() | {
                "hidden_size": target.config.hidden_size,
                "intermediate_size": max(old.intermediate_size, target.config.intermediate_size),
                "num_attention_heads": old.num_attention_heads * factor,
                "num_key_value_heads": old.num_key_value_heads * factor,
                "rms_norm_eps": old.rms_norm_eps / factor,
                "vocab_size": target.config.vocab_size,
            })  # fmt: skip
            settings = replace(head.settings, target_hidden_size=target.config.hidden_size)
            larger = Eagle3Head(config, settings, target.get_input_embeddings())
            if head.target_ids is not None:
                larger.set_vocabulary(head.target_ids)
        else:
            larger = MtpHead(target)
    larger.to(target.dtype).eval()
    _fill(own_modules(larger, target), own_modules(head, plain), Placement.of(old, larger.config), seed)
    inflated: Head = larger
    return inflated


def _check_holds(shape: Any, old: Any, dtype: torch.dtype) -> None:
    """Raise InvalidInputError if a :class:`Shape` without None cannot hold a model with this config and dtype."""
    num_heads, num_kv_heads, vocab_size = shape.num_heads, shape.num_kv_heads, shape.vocab_size
    needs = {
        f"a multiple of hidden size {old.hidden_size}": shape.hidden_size % old.hidden_size == 0,
        f"at least {old.intermediate_size} MLP neurons": shape.intermediate_size >= old.intermediate_size,
        f"at least {old.num_hidden_layers} layers": shape.num_layers >= old.num_hidden_layers,
        f"a multiple of head size {old.head_dim}": shape.head_dim % old.head_dim == 0,
        f"at least {old.num_key_value_heads} K/V heads": num_kv_heads >= old.num_key_value_heads,
        "for each K/V head as many heads as before, or more": num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads >= old.num_attention_heads // old.num_key_value_heads,
        f"at least {old.vocab_size} ids": vocab_size >= old.vocab_size,
        "additional ids only with a larger hidden size": vocab_size == old.vocab_size
        or shape.hidden_size > old.hidden_size,
        "additional ids only in bf16 or fp32": vocab_size == old.vocab_size or dtype != torch.float16,
        "tied embeddings only if the model has them": old.tie_word_embeddings or not shape.tie_word_embeddings,
    }
    if missing := [need for need, is_met in needs.items() if not is_met]:
        raise InvalidInputError(f"{shape} cannot hold this model: it must have {', '.join(missing)}")


def _fill(larger: torch.nn.Module, source: torch.nn.Module, placement: Placement, seed: int) -> None:
    """Fill the weights of a larger model from those of a smaller one."""
    sources = dict(source.named_parameters())
    generators = dict[torch.device, torch.Generator]()
    for name, parameter in larger.named_parameters():
        generator = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(seed))
        shared = "model.embed_tokens.weight" if name == "lm_head.weight" else name  # if tied
        placement.fill(name, parameter, sources.get(name, sources.get(shared)), generator)
