"""Checks that arguments are loaded models and tokenizers."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.errors import InvalidTypeError, UnsupportedModelError


def check_causal_lm(name: str, model: Any) -> PreTrainedModel:
    """Return the model, or the model inside a PEFT model.

    Raises:
        InvalidTypeError: the argument is no loaded transformers causal LM.
        UnsupportedModelError: its adapter cannot be speculated.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise UnsupportedModelError(
                f"{name} has a PEFT adapter that puts virtual tokens before the prompt, which cannot be "
                "speculated; use an adapter of its layers, such as LoRA, or call generate without slo_tpot"
            )
        model = model.get_base_model()
    if hasattr(model, "_orig_mod"):
        raise InvalidTypeError(
            f"{name} is a compiled model, whose layers cannot use tree attention; pass the model as it was before "
            "torch.compile"
        )
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidTypeError(
            f"{name} must be a loaded transformers model with a language-modelling head, such as "
            f"AutoModelForCausalLM.from_pretrained(...) returns; got {type(model).__name__}"
        )
    return model


def check_tokenizer(tokenizer: Any, name: str = "tokenizer") -> None:
    """Raise InvalidTypeError unless the argument is None, or can be called and decodes."""
    if tokenizer is not None and not (callable(tokenizer) and callable(getattr(tokenizer, "decode", None))):
        raise _no_tokenizer(name, tokenizer)


def check_vocabulary_of(name: str, tokenizer: Any) -> None:
    """Raise InvalidTypeError unless the argument is a tokenizer of transformers, whose tokens can be translated."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _no_tokenizer(name, tokenizer)


def _no_tokenizer(name: str, given: Any) -> InvalidTypeError:
    return InvalidTypeError(
        f"{name} must be a loaded tokenizer, such as AutoTokenizer.from_pretrained(...) returns; got "
        f"{type(given).__name__}"
    )
