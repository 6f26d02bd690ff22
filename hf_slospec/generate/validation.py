"""Checks of a call before any work: errors name the argument, the problem and the remedy."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    BaseQuantizedLayer,
    DummyLayer,
    DynamicLayer,
    LinearAttentionLayer,
    StaticLayer,
)
from transformers.generation import GenerationMode, MaxTimeCriteria, StoppingCriteriaList

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.rows import Rows
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.length_rope import varying_ropes
from hf_slospec.model.loading import check_tokenizer
from hf_slospec.model.ownership import foreign_members
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import CACHE_NAME, CACHE_NAMES, given_cache, vocab_size

# Keyword arguments from stock that the package handles, or that do not affect the output.
PREPARED = {
    *CACHE_NAMES,
    "attention_mask",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "use_cache",
}
CACHE_LAYERS = (DynamicLayer, StaticLayer, DummyLayer, LinearAttentionLayer)
HALVES = ("self_attention_cache", "cross_attention_cache")  # of a cache for an encoder-decoder
UNSUPPORTED_CACHES = ("quantized", "paged")  # they round K/V, or belong to another decoding loop


def check_make_policy(make_policy: Any) -> Any:
    """Return the argument, or raise InvalidTypeError unless it is callable or None."""
    if make_policy is not None and not callable(make_policy):
        raise InvalidTypeError(
            "make_policy must be a class or function that takes a config and StepCosts and returns a policy, got "
            f"{type(make_policy).__name__}"
        )
    return make_policy


def check_config(config: Any) -> SLOSpecConfig:
    """Return the config, the default one for None; raise InvalidTypeError for anything else."""
    if config is not None and not isinstance(config, SLOSpecConfig):
        raise InvalidTypeError(f"config must be a SLOSpecConfig, got {type(config).__name__}")
    return config or SLOSpecConfig()


def check_flag(name: str, value: Any) -> bool:
    """Return a setting that is on or off; raise InvalidTypeError for anything else."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_pair(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any
) -> None:
    """Refuse ``assistant_tokenizer`` as stock does: for vocabularies of one size, and without
    ``tokenizer``.

    Raises:
        InvalidInputError: the message says what to leave out or to add.
    """
    if vocab_size(target) == vocab_size(draft):
        raise InvalidInputError(
            f"assistant_tokenizer is for an assistant_model with another tokenizer, and both models have "
            f"{vocab_size(target)} tokens; leave it out, or, if their ids differ all the same, draft with "
            "drafter=hf_slospec.load_drafter(assistant_model, model, tokenizer=..., assistant_tokenizer=...)"
        )
    if tokenizer is None:
        raise InvalidInputError(
            "assistant_tokenizer was given without tokenizer, that of the model; pass both"
        )


def configured(name: str, model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    """Return a setting of the call, otherwise of its generation config, otherwise of the model's."""
    if (value := arguments.get(name)) is not None:
        return value
    for config in (arguments.get("generation_config"), model.generation_config):
        if (value := getattr(config, name, None)) is not None:
            return value
    return None


def check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse arguments before stock ``generate`` sees them.

    Raises:
        InvalidInputError, InvalidTypeError, UnsupportedOptionError: the message names the argument.
    """
    if not isinstance(given := arguments.get("generation_config"), (GenerationConfig, NoneType)):
        raise InvalidTypeError(
            f"generation_config must be a GenerationConfig, got {type(given).__name__}"
        )
    for name, instead in (
        ("custom_generate", "call generate without slo_tpot"),
        ("token_healing", "heal the prompt first"),
        ("synced_gpus", "processes may take different numbers of speculated steps"),
        ("compile_config", "SLOSpecConfig(compile=...) is for the forwards of speculation"),
    ):
        value = configured(name, model, arguments)
        if value is not None and value is not False:
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
        whose = (
            ""
            if arguments.get("use_cache") is False
            else ", the default of this model's generation config,"
        )
        raise UnsupportedOptionError(
            f"{cache_name} and use_cache=False{whose} contradict each other; leave {cache_name} out, or pass "
            "use_cache=True"
        )
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length"):
        value = configured(name, model, arguments)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, numbers.Integral)
        ):
            raise InvalidTypeError(f"{name} must be an integer, got {value!r}")
    _check_lookup(configured("prompt_lookup_num_tokens", model, arguments))
    embeds = arguments.get("inputs_embeds")
    has_cache = cache is not None
    if embeds is not None and not (
        isinstance(embeds, torch.Tensor) and embeds.ndim == 3 and embeds.numel()
    ):
        raise InvalidInputError(
            "inputs_embeds must be a tensor of shape [batch, length, hidden], none of them 0"
        )
    hidden = getattr(model.get_input_embeddings(), "embedding_dim", None)
    if embeds is not None and hidden not in (None, embeds.shape[2]):
        raise InvalidInputError(
            f"inputs_embeds has shape {list(embeds.shape)}; this model's embeddings have {hidden} channels, as "
            "its get_input_embeddings() returns them"
        )
    for name in ("inputs", "input_ids"):
        if name == "inputs" and model.main_input_name not in ("input_ids", "inputs_embeds"):
            continue  # audio or images for an encoder
        ids = arguments.get(name)
        if ids is not None and not isinstance(ids, torch.Tensor):
            raise InvalidTypeError(
                f"{name} must be a tensor of token ids, got {type(ids).__name__}; did you mean generate(**inputs)?"
            )
        if isinstance(ids, torch.Tensor) and ids.dtype not in (torch.int64, torch.int32):
            raise InvalidTypeError(
                f"{name} must hold token ids as int64, got {ids.dtype}; convert them with .long()"
            )
        if isinstance(ids, torch.Tensor) and ids.ndim not in (1, 2):
            raise InvalidInputError(
                f"{name} must be [batch, length] or [length], got shape {list(ids.shape)}"
            )
        if isinstance(ids, torch.Tensor) and not ids.numel() and embeds is None:
            raise InvalidInputError(
                f"{name} is empty, shape {list(ids.shape)}; give every row at least one token"
            )
        mask = arguments.get("attention_mask")
        if (
            embeds is not None
            or has_cache
            or not isinstance(ids, torch.Tensor)
            or not isinstance(mask, torch.Tensor)
        ):
            # A mask over cached or embedded tokens is checked when it is known how many there are
            continue
        if mask.shape != ids.shape:
            raise InvalidInputError(
                f"attention_mask has shape {list(mask.shape)} and {name} {list(ids.shape)}; they must be equal"
            )


def check_decoder_only(model: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModelError for an encoder-decoder, which ``name`` does not take."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} takes decoder-only models, and {type(model).__name__} is an encoder-decoder; call generate, which "
            "takes batches"
        )


def check_evaluating(model: PreTrainedModel) -> None:
    """Refuse a model in training mode with dropout, which draws from the global generator, or
    without a K/V cache.
    """
    if model.training and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode with gradient checkpointing, which drops K and V; turn "
            "it off or call model.eval() first, as TRL does for its rollouts"
        )
    dropping = [
        name or "model"
        for name, module in model.named_modules()
        if module.training and _drops(module)
    ]
    if model.training and dropping:
        raise UnsupportedModelError(
            f"{type(model).__name__} is in training mode and has dropout ({', '.join(dropping[:3])}), which makes "
            "every forward random; load it without (LoraConfig(lora_dropout=0.0), attention_dropout=0.0 in the model's "
            "config), call model.eval() first, or pass fallback=True for stock generate"
        )


def _drops(module: torch.nn.Module) -> bool:
    rates = [
        getattr(module, name, 0) for name in ("p", "dropout", "attention_dropout", "attn_dropout")
    ]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def check_cache(name: str, cache: Any, is_prepared: bool = False) -> None:
    """Refuse a cache with code that is not transformers' own, or whose layers cannot be read.

    If stock ``generate`` has prepared it, it may hold both caches of an encoder-decoder.
    """
    if cache is None:
        return
    if not isinstance(cache, Cache) and not hasattr(cache, "get_seq_length"):
        raise InvalidTypeError(
            f"{name} must be a transformers Cache, such as DynamicCache(), got {type(cache).__name__}"
        )
    caches = [vars(cache)[half] for half in HALVES if is_prepared and half in vars(cache)] or [
        cache
    ]
    layers = [layer for each in caches for layer in getattr(each, "layers", [each])]
    kinds = {
        kind
        for each in caches
        if (kind := getattr(each, "layer_class_to_replicate", None)) is not None
    }
    if foreign := foreign_members((cache, *caches, *layers, *kinds)):
        kind = UnsupportedModelError if is_prepared else UnsupportedOptionError
        raise kind(
            f"{name}, a {type(cache).__name__}, has members that are not transformers' own ({', '.join(foreign)}), and "
            "speculation keeps K and V in a cache of its own, so they would not run; use a DynamicCache, pass "
            "fallback=True, or call generate without slo_tpot"
        )
    for layer in layers:
        if not isinstance(layer, CACHE_LAYERS) or isinstance(layer, BaseQuantizedLayer):
            raise UnsupportedOptionError(
                f"{name} with layers of type {type(layer).__name__} cannot be combined with slo_tpot; use a "
                "DynamicCache, or pass the whole text as input_ids"
            )


def _check_lookup(num_tokens: Any) -> None:
    if num_tokens is not None and (not isinstance(num_tokens, int) or num_tokens < 1):
        raise InvalidInputError(
            f"prompt_lookup_num_tokens must be a positive integer, got {num_tokens!r}"
        )


def check_options(
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    names_beside_text: Sequence[str] = (),
) -> None:
    """Refuse options that tree speculation cannot honour, on the prepared generation config.

    ``names_beside_text`` are inputs that only the model's own forward reads, such as images.
    """
    known = {*PREPARED, *names_beside_text, "mm_token_type_ids"}
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedOptionError(
            f"slo_tpot works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}; "
            "set num_beams=1 (and no other search option), or call generate without slo_tpot"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if generation_config.return_dict_in_generate and getattr(generation_config, name, False):
            raise UnsupportedOptionError(
                f"{name}=True is not available with slo_tpot: stock returns them per forward of one token; "
                "call generate without slo_tpot"
            )
    given = (
        k for k, v in model_kwargs.items() if v is not None and not (type(v) is dict and not v)
    )
    if extra := sorted(name for name in given if name not in known):
        raise UnsupportedOptionError(
            f"{', '.join(extra)} cannot be combined with slo_tpot; leave it out"
        )


def without_token_types(model_kwargs: dict[str, Any], checked: CheckedModel) -> dict[str, Any]:
    """Return the inputs of a text without token types, as tokenizers of BERT write them.

    Raises:
        UnsupportedOptionError: the types change what the model computes.
    """
    types = model_kwargs.get("token_type_ids")
    if types is None:
        return model_kwargs
    if checked.ranks.is_led or bool(types.any()) or not checked.ignores_zero_types:
        raise UnsupportedOptionError(
            f"token_type_ids cannot be combined with slo_tpot where they change what {type(checked.model).__name__} "
            "computes; only zeros that mean the same as none are taken, so call generate without slo_tpot"
        )
    return {name: value for name, value in model_kwargs.items() if name != "token_type_ids"}


def check_criteria(criteria: StoppingCriteriaList, num_ranks: int) -> None:
    """Raise UnsupportedOptionError if the processes of a model would end an output at different
    tokens.
    """
    if num_ranks > 1 and any(isinstance(each, MaxTimeCriteria) for each in criteria):
        raise UnsupportedOptionError(
            "max_time cannot be combined with slo_tpot and a tensor-parallel model, whose processes would stop at "
            "different tokens; leave it out, and limit the output by max_new_tokens"
        )


def check_forwards(model: Any, processors: Sequence[Any], prefills_whole: bool) -> None:
    """Raise UnsupportedOptionError if a request needs forwards of the model in one of its processes
    alone.
    """
    if prefills_whole:
        raise UnsupportedOptionError(
            f"{type(model).__name__} processes prompts as a whole, and the batcher of a tensor-parallel model cannot; "
            "call generate in every process, while no batcher runs"
        )
    for each in processors:
        if any(
            isinstance(value, torch.nn.Module) for value in getattr(each, "__dict__", {}).values()
        ):
            raise UnsupportedOptionError(
                f"{type(each).__name__} forwards a model, and the batcher of a tensor-parallel model runs processors "
                "in its first process alone; leave out what asks for it, such as guidance_scale"
            )


def check_prompts(rows: Rows, checked: CheckedModel, has_placeholders: bool = False) -> None:
    """Refuse prompts that the target cannot process exactly.

    With ``has_placeholders``, ids beyond the vocabulary may stand for images.

    Raises:
        InvalidInputError, UnsupportedOptionError: the message names the row and the argument.
    """
    target = checked.packed
    counts_all = target.has_states or any(layer.window or layer.chunk for layer in target.layers)
    limit = target.max_positions
    for params in rows.params:
        prompt_len = len(params.prompt)
        if prompt_len == 0:
            raise UnsupportedInputError(
                f"row {params.row} of input_ids is empty or all padding; give it at least one token"
            )
        if limit is not None and params.max_len - 1 > limit:  # the last needs no position
            raise UnsupportedInputError(
                f"row {params.row}: prompt of {prompt_len} tokens + max_new_tokens={params.max_new_tokens} "
                f"exceed the model's {limit} positions; shorten the prompt or set max_new_tokens to at most "
                f"{max(limit - prompt_len + 1, 0)}"
            )
        if target.num_selected is not None and params.max_len > target.num_selected:
            raise UnsupportedInputError(
                f"row {params.row} may get {params.max_len} tokens long, and beyond {target.num_selected} this model's "
                "layers select keys, of which equal scores leave the choice open; lower max_new_tokens to at most "
                f"{max(target.num_selected - prompt_len, 0)}, or call generate without slo_tpot"
            )
        mask = rows.prompt.mask[params.row]  # [length] bool
        if not bool(mask.all()) and checked.counts_padding:
            raise UnsupportedInputError(
                f"attention_mask masks tokens of row {params.row}, and {type(target.model).__name__} counts them as "
                "text, so its output would depend on the other rows; pass rows of one length, or one row at a time"
            )
        if bool((mask[:-1] & ~mask[1:]).any()) and (counts_all or checked.counts_gaps):
            raise UnsupportedOptionError(
                f"attention_mask masks tokens inside row {params.row}, which a sliding window, a chunk, a recurrent "
                "state or a bias by place would count; pad on the left only, or call generate without slo_tpot"
            )
    _check_rope(rows, target)
    ids = rows.prompt.tokens.clamp(max=0) if has_placeholders else rows.prompt.tokens
    check_ids("input_ids", (int(ids.min()), int(ids.max())), target.vocab_size)
    cached = rows.prompt.cached_shapes
    if cached and cached != [
        (layer.shape.key.num_heads, layer.shape.key.dim) for layer in target.layers
    ]:
        raise InvalidInputError(
            f"{CACHE_NAME} holds {len(cached)} layers, whose shapes are not those of this model's "
            f"{len(target.layers)}; pass a cache that the same model wrote"
        )


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidInputError, which names the argument, for token ids outside of the vocabulary."""
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise InvalidInputError(
            f"{name} has token {wrong[0]}, outside of the vocabulary of {vocab_size} tokens; use this model's tokenizer"
        )


def _check_rope(rows: Rows, target: PackedModel) -> None:
    """Refuse outputs that may grow beyond a change of RoPE where stock computes K/V again, or RoPE
    is not known.

    Models for which stock does so prepare inputs by a method of their own.
    """
    model: Any = target.model
    is_plain = (
        type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    )
    longest = max(len(params.prompt) for params in rows.params)
    padded_len = rows.input_ids.shape[1]
    end = padded_len + max(params.max_new_tokens for params in rows.params)
    for kind, trained in varying_ropes(model.config.get_text_config()):
        if end > trained and not target.rope.modules:
            raise UnsupportedOptionError(
                f"this model's {kind} RoPE changes beyond {trained} tokens, and none of its modules has a rope_type; "
                f"lower max_new_tokens to at most {max(trained - padded_len, 0)}, or call generate without slo_tpot"
            )
        if longest <= trained < end and not is_plain:
            raise UnsupportedOptionError(
                f"this model's {kind} RoPE changes beyond {trained} tokens, where stock computes the K/V of the text "
                f"anew, and the prompt of {longest} tokens may grow to {end}; lower max_new_tokens to at most "
                f"{max(trained - padded_len, 0)}, or call generate without slo_tpot"
            )
