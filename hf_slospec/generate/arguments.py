"""Checks of the caller's arguments before stock ``generate`` gets them. Error messages name the
argument, the problem and the remedy.
"""

from __future__ import annotations

import numbers
from types import NoneType
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    BaseQuantizedLayer,
    DummyLayer,
    DynamicLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.model.loading import check_tokenizer
from hf_slospec.model.ownership import foreign_members
from hf_slospec.model.properties import given_cache

CACHE_LAYERS = (DynamicLayer, StaticLayer, DummyLayer, LinearAttentionLayer)
# Attributes of an encoder-decoder's cache that hold its two caches.
HALVES = ("self_attention_cache", "cross_attention_cache")
# Values of cache_implementation: "quantized" rounds K/V, "paged" is for another decoding loop.
UNSUPPORTED_CACHES = ("quantized", "paged")
REFUSED = {  # argument of generate -> what to do instead
    "custom_generate": "use stock generate (fallback=True)",
    "token_healing": "heal the prompt first",
    "synced_gpus": "processes may take different numbers of speculated steps",
    "compile_config": "SLOSpecConfig(compile=...) is for the forwards of speculation",
}
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")


def check_flag(name: str, value: Any) -> bool:
    """Return a bool argument.

    Raises:
        InvalidTypeError: the value is no bool.
    """
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_decoder_only(model: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModelError if the model is an encoder-decoder; the message says that
    ``name`` does not support it.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} takes decoder-only models, and {type(model).__name__} is an encoder-decoder; call generate, which "
            "takes batches"
        )


def configured(name: str, model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    """Return a setting from the call's arguments, else from the call's generation config, else from
    the model's; None if it is set nowhere.
    """
    values = (
        arguments.get(name),
        getattr(arguments.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    )
    return next((value for value in values if value is not None), None)


def check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that speculation does not support, and models in a training
    mode that it does not support.

    Raises:
        InvalidInputError, InvalidTypeError, UnsupportedOptionError: the message names the argument.
        UnsupportedModelError: the model applies dropout, or gradient checkpointing turns its K/V
            cache off.
    """
    if not isinstance(config := arguments.get("generation_config"), (GenerationConfig, NoneType)):
        raise InvalidTypeError(
            f"generation_config must be a GenerationConfig, got {type(config).__name__}"
        )
    for name, instead in REFUSED.items():
        if (value := configured(name, model, arguments)) is not None and value is not False:
            raise UnsupportedOptionError(f"{name} cannot be combined with slo_tpot; {instead}")
    if (kind := configured("cache_implementation", model, arguments)) in UNSUPPORTED_CACHES:
        raise UnsupportedOptionError(
            f"cache_implementation={kind!r} cannot be combined with slo_tpot; speculation keeps its own K/V cache, so "
            "leave it out"
        )
    check_tokenizer(arguments.get("tokenizer"))
    cache_name, cache = given_cache(arguments)
    check_cache(cache_name, cache)
    if cache is not None and configured("use_cache", model, arguments) is False:
        is_default = arguments.get("use_cache") is not False
        whose = ", the default of this model's generation config," if is_default else ""
        raise UnsupportedOptionError(
            f"{cache_name} and use_cache=False{whose} contradict each other; leave {cache_name} out, or pass "
            "use_cache=True"
        )
    for name in LENGTHS:
        value = configured(name, model, arguments)
        if isinstance(value, bool) or not isinstance(value, (numbers.Integral, NoneType)):
            raise InvalidTypeError(f"{name} must be an integer, got {value!r}")
    num_tokens = configured("prompt_lookup_num_tokens", model, arguments)
    if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 1):
        raise InvalidInputError(
            f"prompt_lookup_num_tokens must be a positive integer, got {num_tokens!r}"
        )
    embeds = arguments.get("inputs_embeds")
    if embeds is not None:
        if not (isinstance(embeds, torch.Tensor) and embeds.ndim == 3 and embeds.numel()):
            raise InvalidInputError(
                "inputs_embeds must be a tensor of shape [batch, length, hidden], none of them 0"
            )
        hidden = getattr(model.get_input_embeddings(), "embedding_dim", None)
        if hidden not in (None, embeds.shape[2]):
            raise InvalidInputError(
                f"inputs_embeds has shape {list(embeds.shape)}; this model's embeddings have {hidden} channels, as "
                "its get_input_embeddings() returns them"
            )
    mask = arguments.get("attention_mask")
    for name in ("inputs", "input_ids"):
        is_text = name == "input_ids" or model.main_input_name in ("input_ids", "inputs_embeds")
        ids = arguments.get(name)
        if ids is None or not is_text:
            continue
        if not isinstance(ids, torch.Tensor):
            raise InvalidTypeError(
                f"{name} must be a tensor of token ids, got {type(ids).__name__}; did you mean generate(**inputs)?"
            )
        shape = list(ids.shape)
        if ids.dtype not in (torch.int64, torch.int32):
            raise InvalidTypeError(
                f"{name} must hold token ids as int64, got {ids.dtype}; convert them with .long()"
            )
        if ids.ndim not in (1, 2):
            raise InvalidInputError(
                f"{name} must be [batch, length] or [length], got shape {shape}"
            )
        if not ids.numel() and embeds is None:
            raise InvalidInputError(
                f"{name} is empty, shape {shape}; give every row at least one token"
            )
        # Masks that also cover cached or embedded tokens are checked in CallInputs.of.
        is_of_ids = embeds is None and cache is None
        if is_of_ids and isinstance(mask, torch.Tensor) and mask.shape != ids.shape:
            raise InvalidInputError(
                f"attention_mask has shape {list(mask.shape)} and {name} {shape}; they must be equal"
            )
    _check_evaluating(model)


def _check_evaluating(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the model is in training mode with dropout, which is random,
    or with gradient checkpointing, which drops K and V.
    """
    if not model.training:
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, which drops K and V; turn "
            "it off or call model.eval() first, as TRL does for its rollouts"
        )
    rates = ("p", "dropout", "attention_dropout", "attn_dropout")
    dropping = [
        name or "model"
        for name, module in model.named_modules()
        if module.training
        and any(isinstance(p := getattr(module, rate, 0), float) and p > 0 for rate in rates)
    ]
    if dropping:
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode and has dropout ({', '.join(dropping[:3])}), which makes "
            "every forward random; load it without (LoraConfig(lora_dropout=0.0), attention_dropout=0.0 in the model's "
            "config), call model.eval() first, or pass fallback=True for stock generate"
        )


def check_cache(name: str, cache: Any, is_prepared: bool = False) -> None:
    """Refuse a cache whose layers cannot be read, or whose class overrides transformers' methods.

    Args:
        name: the argument's name, for messages.
        cache: the cache; None passes.
        is_prepared: stock ``generate`` has prepared the cache, so it may consist of the two caches
            of an encoder-decoder.

    Raises:
        InvalidTypeError, UnsupportedOptionError, UnsupportedModelError: the cache is refused.
    """
    if cache is None:
        return
    if not isinstance(cache, Cache) and not hasattr(cache, "get_seq_length"):
        raise InvalidTypeError(
            f"{name} must be a transformers Cache, such as DynamicCache(), got {type(cache).__name__}"
        )
    halves = [vars(cache)[half] for half in HALVES if is_prepared and half in vars(cache)]
    caches = halves or [cache]
    layers = [layer for each in caches for layer in getattr(each, "layers", [each])]
    kinds = {getattr(each, "layer_class_to_replicate", None) for each in caches} - {None}
    if foreign := foreign_members((cache, *caches, *layers, *kinds)):
        error = UnsupportedModelError if is_prepared else UnsupportedOptionError
        raise error(
            f"{name}, a {type(cache).__name__}, has members that are not transformers' own ({', '.join(foreign)}), and "
            "speculation keeps K and V in a cache of its own, so they would not run; use a DynamicCache, pass "
            "fallback=True for stock generate"
        )
    for layer in layers:
        if not isinstance(layer, CACHE_LAYERS) or isinstance(layer, BaseQuantizedLayer):
            raise UnsupportedOptionError(
                f"{name} with layers of type {type(layer).__name__} cannot be combined with slo_tpot; use a "
                "DynamicCache, or pass the whole text as input_ids"
            )
