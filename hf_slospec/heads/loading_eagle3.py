"""Loading of EAGLE-3 and P-EAGLE heads, in the layouts of their publishers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_slospec.errors import IncompatibleDraftError, UnsupportedModelError
from hf_slospec.heads import gemma4
from hf_slospec.heads.checkpoint import (
    Checkpoint,
    check_layers,
    check_verifier,
    check_vocabulary,
    fields_of_layers,
    filled,
    hidden_size_of,
    num_layers_of,
    read_config,
    shared_modules,
    target_ids_of,
    tensors_of,
)
from hf_slospec.heads.eagle3 import (
    SLIDING,
    Eagle3Head,
    Eagle3Settings,
    PEagleHead,
    default_feature_layers,
)
from hf_slospec.heads.mtp import DraftHead
from hf_slospec.model.properties import input_device

DEFAULT_PROPOSALS = (
    8  # positions that P-EAGLE heads are trained to predict, if their config does not tell
)


def is_speculators_eagle3(checkpoint: Checkpoint) -> bool:
    """Return whether this is an EAGLE-3 or P-EAGLE head of speculators."""
    return checkpoint.config.get("speculators_model_type") in ("eagle3", "peagle")


def load_speculators_eagle3(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    """Return the head; raises as ``load_head``."""
    config = checkpoint.config
    check_verifier(checkpoint, target)
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    return _load_eagle3(
        checkpoint, target, fields_of_layers(checkpoint.source, config), config, layer_ids
    )


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Return whether this is an EAGLE-3 or P-EAGLE head of another publisher."""
    names = {name.removeprefix("model.") for name in checkpoint.files}
    is_one = checkpoint.is_named("eagle3") or not names.isdisjoint(
        ("midlayer.hidden_norm.weight", "mask_hidden")
    )
    return is_one and "speculators_model_type" not in checkpoint.config


def load_published_eagle3(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    """Return the head; raises as ``load_head``."""
    config = checkpoint.config
    options = config | (config.get("eagle_config") or {})
    if options.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            f"{checkpoint.source} reads one hidden state, as EAGLE-2 does; EAGLE-3 reads several"
        )
    # Layers whose outputs are read; output_hidden_states begins with the embeddings.
    outputs_of = options.get("eagle_aux_hidden_state_layer_ids") or options.get("target_layer_ids")
    return _load_eagle3(
        checkpoint, target, config, options, outputs_of and [layer + 1 for layer in outputs_of]
    )


def _load_eagle3(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    layers: Mapping[str, Any],
    options: Mapping[str, Any],
    feature_layers: list[int] | None,
) -> Eagle3Head:
    """Return an EAGLE-3 head.

    Args:
        checkpoint: the head's.
        target: the model that it drafts for.
        layers: fields of the layers' config.
        options: fields of the head's config.
        feature_layers: numbered as in output_hidden_states; None: the default ones.
    """
    source = checkpoint.source
    num_layers = num_layers_of(target)
    config = _config_of_layers(source, layers)
    check_vocabulary(source, config.vocab_size, target)
    read = default_feature_layers(num_layers) if feature_layers is None else tuple(feature_layers)
    check_layers(source, read, num_layers)

    tensors = _with_midlayer(tensors_of(checkpoint))
    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    draft_vocab = int(options.get("draft_vocab_size") or config.vocab_size)
    target_ids = target_ids_of(source, d2t, t2d, draft_vocab, config.vocab_size)
    settings = Eagle3Settings(
        read,
        hidden_size_of(target),
        draft_vocab,
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        norm_before_fc=bool(options.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(options.get("fc_norm")) or "fc_norm.0.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    _check_features(source, settings, tensors)
    embeddings, lm_head = shared_modules(
        source, config.hidden_size, tensors, target_ids is not None, target
    )
    masks = _mask_settings(source, options, config.vocab_size) if "mask_hidden" in tensors else None
    if masks is not None:
        tensors["mask_entry.hidden"] = tensors.pop("mask_hidden")

    def build() -> Eagle3Head:
        if config.model_type in gemma4.MODEL_TYPES:
            scaled = gemma4.scaled_embeddings(config) if embeddings is None else embeddings
            return gemma4.Gemma4Eagle3Head(config, settings, scaled, lm_head)
        own = (
            nn.Embedding(config.vocab_size, config.hidden_size)
            if embeddings is None
            else embeddings
        )
        return (
            Eagle3Head(config, settings, own, lm_head)
            if masks is None
            else PEagleHead(config, settings, own, lm_head, **masks)
        )

    head = filled(checkpoint, target, build, tensors, UnsupportedModelError)
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


def _mask_settings(source: str, options: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """Return the settings of a P-EAGLE head: its mask token, and how many positions its publisher
    lets it predict.
    """
    token = options.get("mask_token_id", options.get("ptd_token_id"))
    if not isinstance(token, int) or not 0 <= token < vocab:
        raise UnsupportedModelError(
            f"{source} is a P-EAGLE head with mask_token_id {token!r} in its config; it must be one of 0 to {vocab - 1}"
        )
    methods = (options.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return {
        "mask_token_id": token,
        "num_proposals": int(methods[0].get("speculative_tokens") or DEFAULT_PROPOSALS),
    }


def _with_midlayer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an EAGLE-3 head with the first layer named ``midlayer`` and plain names
    in others.
    """
    has_midlayer = any(name.startswith("midlayer.") for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        if not has_midlayer:
            name = re.sub(r"^layers\.0\.", "midlayer.", name)
        # SGLang's name of the only norm before the attention of later layers.
        plain = re.sub(r"^(layers\.\d+)\.hidden_norm\.", r"\1.input_layernorm.", name)
        renamed[name if plain in tensors else plain] = tensor
    return renamed


def _config_of_layers(source: str, fields: Mapping[str, Any]) -> Any:
    kind = fields.get("model_type", "llama")
    if kind in gemma4.MODEL_TYPES:
        if (num_layers := fields.get("num_hidden_layers")) != 1:
            raise UnsupportedModelError(
                f"{source} has {num_layers} layers of Gemma 4; a head with 1 can be loaded"
            )
        return gemma4.config_of_gemma4(source, fields)
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModelError(
            f"{source} has layers of type {kind!r}; only Llama, Qwen3 and Gemma 4 layers can be loaded"
        )
    config: Any = read_config(source, Qwen3Config if kind == "qwen3" else LlamaConfig, fields)
    # A window counts in layers that the config names only, as for the publishers' classes.
    if SLIDING not in (getattr(config, "layer_types", None) or ()):
        config.sliding_window = None
    elif getattr(config, "sliding_window", None) is None:
        raise UnsupportedModelError(
            f"{source} has layers with a sliding window, and no sliding_window in its config"
        )
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise UnsupportedModelError(
            f"{source} has rotary embeddings of unknown type {rope['rope_type']!r}"
        )
    return config


def _check_features(
    source: str, settings: Eagle3Settings, tensors: Mapping[str, torch.Tensor]
) -> None:
    size = settings.target_hidden_size
    num_features = len(settings.feature_layers)
    if "fc.weight" in tensors and (width := tensors["fc.weight"].shape[1]) != num_features * size:
        raise IncompatibleDraftError(
            f"{source} reads {width} features; {num_features} hidden states of the target have {num_features * size}"
        )
