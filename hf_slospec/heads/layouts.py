"""Choice of the network class and its config for a published EAGLE-3, P-EAGLE or block head, from
its config file and tensor names, which differ between publishers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_slospec.drafters.checkpoint import Checkpoint
from hf_slospec.drafters.head import Head
from hf_slospec.errors import IncompatibleDraftError, UnsupportedModelError
from hf_slospec.heads import gemma4
from hf_slospec.heads.checkpoint import (
    fields_of_layers,
    hidden_size_of,
    num_layers_of,
    read_config,
)
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.heads.dflash2 import DFlash2Head
from hf_slospec.heads.dspark import MARKOV_KINDS, DominoHead, DSparkHead
from hf_slospec.heads.eagle3 import (
    SLIDING,
    Eagle3Head,
    Eagle3Settings,
    PEagleHead,
    default_feature_layers,
)
from hf_slospec.heads.lilicorr import ConvolvedLiLiCorrHead, LiLiCorrHead
from hf_slospec.heads.xpress import XPressHead

Tensors = dict[str, torch.Tensor]

# Number of positions that a P-EAGLE head predicts in one forward if its config does not say.
DEFAULT_PROPOSALS = 8
# Config fields of block heads that the speculators library writes outside of
# transformer_layer_config.
BLOCK_SETTINGS = (
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "sample_from_anchor",
    "sliding_window_non_causal", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "output_multiplier", "final_logit_softcapping", "xpress_rank", "xpress_mlp_ratio",
)  # fmt: skip
PROJECTORS = ("dflash", "dspark", "domino", "xpress", "lilicorr")
DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    "sliding_window_non_causal": True,
}  # fmt: skip
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")


class Layout(NamedTuple):
    """Network class and config for one checkpoint."""

    config: Any
    # (target's embeddings or None, target's lm_head or None) -> head with random weights
    build: Callable[[nn.Module | None, nn.Module | None], Head]
    draft_vocab: int  # number of tokens that the head's logits cover


def eagle3_layout(checkpoint: Checkpoint, target: PreTrainedModel, tensors: Tensors) -> Layout:
    """Return the network class and config of an EAGLE-3 or P-EAGLE head.

    Args:
        checkpoint: the head's checkpoint.
        target: the model that the head drafts for.
        tensors: the head's tensors by name.

    Raises:
        UnsupportedModelError: the config is invalid, or asks for something not implemented.
        IncompatibleDraftError: the head reads features of another size than the target's.
    """
    source = checkpoint.source
    layers = options = checkpoint.config
    if "speculators_model_type" in options:
        layers = fields_of_layers(source, options)
        read = options.get("eagle_aux_hidden_state_layer_ids")
    else:
        options = options | (options.get("eagle_config") or {})
        if options.get("use_aux_hidden_state") is False:
            raise UnsupportedModelError(
                f"{source} reads one hidden state, as EAGLE-2 does; EAGLE-3 reads several"
            )
        read = options.get("eagle_aux_hidden_state_layer_ids") or options.get("target_layer_ids")
        # The config numbers layers from 0; entry 0 of output_hidden_states is the embeddings.
        read = [layer + 1 for layer in read] if read else None
    config = _config_of_layers(source, layers)
    settings = Eagle3Settings(
        default_feature_layers(num_layers_of(target)) if read is None else tuple(read),
        hidden_size_of(target),
        int(options.get("draft_vocab_size") or config.vocab_size),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        norm_before_fc=bool(options.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(options.get("fc_norm")) or "fc_norm.0.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    num_features = len(settings.feature_layers)
    size = num_features * settings.target_hidden_size
    if "fc.weight" in tensors and (width := tensors["fc.weight"].shape[1]) != size:
        raise IncompatibleDraftError(
            f"{source} reads {width} features; {num_features} hidden states of the target have {size}"
        )
    kind: Callable[..., Head] = Eagle3Head
    if config.model_type in gemma4.MODEL_TYPES:
        kind = gemma4.Gemma4Eagle3Head
    elif "mask_entry.hidden" in tensors:
        kind = partial(PEagleHead, **_mask_settings(source, options, config.vocab_size))
    return Layout(config, partial(kind, config, settings), settings.draft_vocab_size)


def _mask_settings(source: str, options: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """Return ``mask_token_id`` and ``num_proposals`` of a P-EAGLE head, from its config."""
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
    # A sliding window applies only if layer_types has sliding layers, as in the publishers' code.
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


def block_layout(checkpoint: Checkpoint, target: PreTrainedModel, tensors: Tensors) -> Layout:
    """Return the network class and config of a DFlash, DFlash2, DSpark, Domino, XPress or LiLiCorr
    head.

    Args:
        checkpoint: the head's checkpoint.
        target: the model that the head drafts for.
        tensors: the head's tensors by name; copies of the target's weights that the head does not
            use are removed.

    Raises:
        UnsupportedModelError: the config is invalid, or asks for something not implemented.
    """
    source = checkpoint.source
    fields = checkpoint.config
    is_of_speculators = "speculators_model_type" in fields
    if is_of_speculators:
        settings = {name: fields[name] for name in BLOCK_SETTINGS if name in fields}
        fields = fields_of_layers(source, fields) | settings
    nested = fields.get("dflash_config") or {}
    published = checkpoint.config.get("speculators_model_type")
    named = (name for name in PROJECTORS[2:] if checkpoint.is_named(name) or name == published)
    default = next(named, "dflash")
    projector = str(nested.get("projector_type") or default).lower()
    if projector not in PROJECTORS:
        raise UnsupportedModelError(
            f"{source} has a projector of type {projector!r}; {', '.join(PROJECTORS)} can be loaded"
        )
    sequential = _sequential_settings(source, fields | nested, tensors)
    is_sequential = bool(sequential["markov_rank"] or sequential["enable_confidence_head"])
    kind: type[DFlashHead] = DSparkHead if is_sequential else DFlashHead
    # is_shifted: default of sample_from_anchor; if True, the root's block token makes the first
    # prediction. DSpark configs leave the setting out, except those of speculators; Domino configs
    # name it shift_label.
    is_shifted = is_sequential or projector == "dspark" or checkpoint.is_named("dspark")
    if projector == "domino":
        kind = DominoHead
        is_shifted = bool(nested.get("shift_label"))
    fields = {"sample_from_anchor": is_shifted and not is_of_speculators} | fields | sequential
    if projector == "xpress":
        kind = XPressHead
        if size := fields.get("xpress_block_size"):
            fields["block_size"] = size
    if projector == "lilicorr":
        kind = LiLiCorrHead
        if any(nested.get(name) for name in CONVOLUTIONS):
            kind = ConvolvedLiLiCorrHead
            fields |= {name: nested.get(name) for name in CONVOLUTIONS}
    if any(name.startswith("candidate_selector.") for name in tensors):
        kind = DFlash2Head
        options = fields | nested
        fields |= {name: options.get(name, value) for name, value in DFLASH2_DEFAULTS.items()}
    unread = ("model_type", "architectures", "auto_map")
    fields = {name: value for name, value in fields.items() if name not in unread}
    fields |= {"target_hidden_size": hidden_size_of(target)}
    if checkpoint.is_named("gemma4dspark") and kind in gemma4.BLOCKS:
        kind = gemma4.BLOCKS[kind]
        config = gemma4.config_of_gemma4(source, fields)
    else:
        config = read_config(source, Qwen3Config, fields)
    num_layers = num_layers_of(target)
    options = fields | nested
    if is_of_speculators and not options.get("aux_hidden_state_layer_ids"):
        config.aux_hidden_state_layer_ids = default_feature_layers(num_layers)
    elif not options.get("target_layer_ids"):
        config.target_layer_ids = _default_block_layers(num_layers, config.num_hidden_layers)
    draft_vocab = int(options.get("draft_vocab_size") or config.vocab_size)
    is_whole = draft_vocab == config.vocab_size
    unused = ["d2t", "t2d"] if is_whole else []
    # speculators saves copies of the target's weights, and does not load them either.
    if is_of_speculators:
        unused += ["embed_tokens.weight", "lm_head.weight"] if is_whole else ["embed_tokens.weight"]
    for name in unused:
        tensors.pop(name, None)
    return Layout(config, partial(kind, config), draft_vocab)


def _default_block_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Return the target layers whose outputs a z-lab head reads if its config names none: as many
    as the head has layers, evenly spaced from layer 1 to the third last; the middle one for 1.
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_layers - 1)) for index in range(num_layers)]


def _sequential_settings(
    source: str, options: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Read the settings of a block head's Markov head and confidence head from its tensors.

    Raises:
        UnsupportedModelError: the config contradicts the tensors.
    """
    embeds = tensors.get("markov_head.markov_w1.weight")
    proj = tensors.get("confidence_head.proj.weight")
    rank = 0 if embeds is None else embeds.shape[1]
    kinds = (kind for part, kind in MARKOV_KINDS.items() if f"markov_head.{part}.weight" in tensors)
    by_tensors: dict[str, Any] = {
        "markov_rank": rank,
        "markov_head_type": next(kinds, "vanilla"),
        "enable_confidence_head": proj is not None,
        "confidence_head_with_markov": proj is not None and "norm.weight" in tensors
        and proj.shape[1] != len(tensors["norm.weight"]),
    }  # fmt: skip
    applies = {"markov_head_type": rank > 0, "confidence_head_with_markov": proj is not None}
    for name, value in by_tensors.items():
        if applies.get(name, True) and options.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"{source} has {name} {options[name]!r} in its config, and tensors of {name} {value!r}"
            )
    return by_tensors
