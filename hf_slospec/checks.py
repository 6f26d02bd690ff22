"""What is refused, before any work: each check names the argument, what is wrong with it and the way out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedOptionError
from hf_slospec.speculator import Speculator

Targets = Sequence[float | None] | float | None
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def check_causal_lm(name: str, model: Any) -> None:
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidTypeError(
            f"{name} must be a loaded transformers model with a language-modelling head, such as "
            f"AutoModelForCausalLM.from_pretrained(...) returns; got {type(model).__name__}"
        )


def check_config(config: Any) -> SLOSpecConfig:
    if config is not None and not isinstance(config, SLOSpecConfig):
        raise InvalidTypeError(f"config must be a SLOSpecConfig, got {type(config).__name__}")
    return config or SLOSpecConfig()


def check_targets(slo_tpot: Any) -> Targets:
    """Targets as plain values; anything but positive finite seconds, None, or a sequence of those is refused."""
    if hasattr(slo_tpot, "tolist"):  # arrays and tensors
        slo_tpot = slo_tpot.tolist()
    for target_s in slo_tpot if isinstance(slo_tpot, (list, tuple)) else [slo_tpot]:
        if target_s is None:
            continue
        if isinstance(target_s, bool) or not isinstance(target_s, numbers.Real):
            raise InvalidTypeError(
                f"slo_tpot must be seconds per output token, None, or a list of those; got {target_s!r}"
            )
        if not math.isfinite(target_s) or target_s <= 0:
            raise InvalidInputError(
                f"slo_tpot must be a positive, finite number of seconds per output token, got {target_s!r}; "
                "use None for a row without a target"
            )
    return slo_tpot


def targets_by_row(slo_tpot: Targets, num_rows: int, num_return_sequences: int) -> list[float | None]:
    """One target per row; a list may name the prompts (each stands for its returned sequences) or all rows."""
    if not isinstance(slo_tpot, (list, tuple)):
        return [slo_tpot] * num_rows
    if len(slo_tpot) * num_return_sequences == num_rows:
        return [target_s for target_s in slo_tpot for _ in range(num_return_sequences)]
    if len(slo_tpot) == num_rows:
        return list(slo_tpot)
    raise InvalidInputError(
        f"slo_tpot has {len(slo_tpot)} entries for {num_rows} rows; give one number for all rows or one entry per row"
    )


def check_arguments(arguments: dict[str, Any]) -> None:
    """What must be refused before stock ``generate`` sees it."""
    for name, instead in (
        ("inputs_embeds", "pass input_ids"),
        ("past_key_values", "pass the whole text as input_ids"),
        ("position_ids", "leave positions to generate"),
        ("custom_generate", "call generate without slo_tpot"),
        ("cache_implementation", "speculation keeps its own KV storage, so leave it out"),
        ("token_healing", "heal the prompt first"),
        ("prompt_lookup_num_tokens", "enable the model without an assistant_model to draft by prompt lookup"),
    ):
        value = arguments.get(name)
        if value is not None and value is not False:
            raise UnsupportedOptionError(f"{name} cannot be combined with slo_tpot; {instead}")
    for name in ("inputs", "input_ids"):
        ids = arguments.get(name)
        if ids is not None and not isinstance(ids, torch.Tensor):
            raise InvalidTypeError(
                f"{name} must be a tensor of token ids, got {type(ids).__name__}; did you mean generate(**inputs)?"
            )
        if isinstance(ids, torch.Tensor) and not ids.numel():
            raise InvalidInputError(f"{name} is empty, shape {list(ids.shape)}; give every row at least one token")
        mask = arguments.get("attention_mask")
        if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.shape != ids.shape:
            raise InvalidInputError(
                f"attention_mask has shape {list(mask.shape)} and {name} {list(ids.shape)}; they must be equal"
            )


def check_options(generation_config: GenerationConfig, logits_processor: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what a tree of tokens cannot honour, on the prepared generation config."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedOptionError(
            f"slo_tpot works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}; "
            "set num_beams=1 (and no other search option), or call generate without slo_tpot"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise UnsupportedOptionError(f"{name}=True is not available with slo_tpot; call generate without slo_tpot")
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in logits_processor):
        raise UnsupportedOptionError(
            "guidance_scale runs the model a second time per token in step with decoding, which speculation breaks; "
            "call generate without slo_tpot"
        )
    if extra := sorted(k for k, v in model_kwargs.items() if k not in PREPARED and v is not None):
        raise UnsupportedOptionError(f"{', '.join(extra)} cannot be combined with slo_tpot; leave it out")


def check_prompts(requests: list[Request], speculator: Speculator, input_ids: torch.Tensor) -> None:
    limit = speculator.target.max_positions
    for request in requests:
        if request.prompt_len == 0:
            raise InvalidInputError(
                f"row {request.index} of input_ids is empty or all padding; give it at least one token"
            )
        if limit is not None and request.prompt_len + request.max_new_tokens - 1 > limit:  # the last needs no position
            raise InvalidInputError(
                f"row {request.index}: prompt of {request.prompt_len} tokens + max_new_tokens={request.max_new_tokens} "
                f"exceed the model's {limit} positions; shorten the prompt or set max_new_tokens to at most "
                f"{max(limit - request.prompt_len + 1, 0)}"
            )
    _check_rope(requests, speculator.target.model.config.get_text_config())
    if int(input_ids.max()) >= speculator.target.vocab_size or int(input_ids.min()) < 0:
        raise InvalidInputError(
            f"input_ids holds ids outside 0 .. {speculator.target.vocab_size - 1}; is it another model's tokenizer?"
        )


def _check_rope(requests: list[Request], config: Any) -> None:
    """Refuse lengths at which RoPE frequencies follow the longest sequence of a forward: a packed row mixes several."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        kind = parameters.get("rope_type")
        trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        shortest, longest = (pick(r.prompt_len + r.max_new_tokens for r in requests) for pick in (min, max))
        is_on_one_side = longest <= trained or (
            kind == "longrope" and min(request.prompt_len for request in requests) > trained
        )
        if kind in ("longrope", "dynamic") and not is_on_one_side:
            raise UnsupportedOptionError(
                f"this model's {kind} RoPE changes with the length of the text beyond {trained} tokens, and rows of "
                f"{shortest} to {longest} tokens would mix; lower max_new_tokens, or call generate without slo_tpot"
            )
