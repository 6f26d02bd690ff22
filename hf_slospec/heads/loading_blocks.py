"""Loading of block heads: DFlash, DFlash2, DSpark and Domino, in the layouts of their publishers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config

from hf_slospec.errors import UnsupportedModelError
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
from hf_slospec.heads.dflash import DFlashHead, default_block_layers
from hf_slospec.heads.dflash2 import DFlash2Head
from hf_slospec.heads.dspark import MARKOV_KINDS, DominoHead, DSparkHead
from hf_slospec.heads.eagle3 import default_feature_layers
from hf_slospec.model.properties import input_device

# Settings of block heads that speculators writes beside those of the layers.
BLOCK_SETTINGS = (
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "sample_from_anchor",
    "sliding_window_non_causal", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "output_multiplier", "final_logit_softcapping",
)  # fmt: skip
PROJECTORS = ("dflash", "dspark", "domino")
DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    "sliding_window_non_causal": True,
}  # fmt: skip
MARKOV = re.compile(
    r"^(markov_w[12]|gate_proj|joint_proj)\."
)  # ModelOpt's names, without the module's
GRU = re.compile(r"^(prefix_gru\.weight_[ih]h)_l0$")  # Domino's names, of a GRU with layers
CODEBOOK = re.compile(
    r"^(candidate_selector\.\w+_codebook)\.weight$"
)  # z-lab's names, of embeddings


def is_block(checkpoint: Checkpoint) -> bool:
    """Return whether this is a head of DFlash, DFlash2, DSpark or Domino."""
    kind = checkpoint.config.get("speculators_model_type")
    if kind is not None:
        return kind in ("dflash", "dflash2", "dspark")
    is_named = (
        checkpoint.is_named("dflash", "dspark", "domino") or "dflash_config" in checkpoint.config
    )
    return is_named or any(
        "markov_w1." in name or "candidate_selector." in name for name in checkpoint.files
    )


def load_block(checkpoint: Checkpoint, target: PreTrainedModel) -> DFlashHead:
    """Return the head; raises as ``load_head``."""
    source = checkpoint.source
    fields = checkpoint.config
    is_published_by_speculators = "speculators_model_type" in fields
    tensors = {_plain_name(name): tensor for name, tensor in tensors_of(checkpoint).items()}
    if is_published_by_speculators:
        check_verifier(checkpoint, target)
        settings = {name: fields[name] for name in BLOCK_SETTINGS if name in fields}
        fields = fields_of_layers(source, fields) | settings
    own = fields.get("dflash_config") or {}
    projector = str(
        own.get("projector_type") or ("domino" if checkpoint.is_named("domino") else "dflash")
    ).lower()
    if projector not in PROJECTORS:
        raise UnsupportedModelError(
            f"{source} has a projector of type {projector!r}; {', '.join(PROJECTORS)} can be loaded"
        )
    sequential = _sequential_settings(source, fields, tensors)
    is_sequential = bool(sequential["markov_rank"] or sequential["enable_confidence_head"])
    is_dspark = is_sequential or projector == "dspark" or checkpoint.is_named("dspark")
    # Publishers of DSpark but speculators leave the setting out, and predict from the root on;
    # Domino's has a name of its own.
    is_shifted = own.get("shift_label") if projector == "domino" else is_dspark
    fields = (
        {"sample_from_anchor": bool(is_shifted) and not is_published_by_speculators}
        | fields
        | sequential
    )
    kind: type[DFlashHead] = (
        DominoHead if projector == "domino" else DSparkHead if is_sequential else DFlashHead
    )
    if any(name.startswith("candidate_selector.") for name in tensors):
        kind = DFlash2Head
        options = {**fields, **(fields.get("dflash_config") or {})}
        fields |= {name: options.get(name, default) for name, default in DFLASH2_DEFAULTS.items()}
    unread = {
        name: value
        for name, value in fields.items()
        if name not in ("model_type", "architectures", "auto_map")
    }
    unread |= {"target_hidden_size": hidden_size_of(target)}
    if checkpoint.is_named("gemma4dspark") and kind in gemma4.BLOCKS:
        kind = gemma4.BLOCKS[kind]
        config = gemma4.config_of_gemma4(source, unread)
    else:
        config = read_config(source, Qwen3Config, unread)
    check_vocabulary(source, config.vocab_size, target)
    num_layers = num_layers_of(target)
    options = unread | (unread.get("dflash_config") or {})
    if is_published_by_speculators and not options.get("aux_hidden_state_layer_ids"):
        config.aux_hidden_state_layer_ids = default_feature_layers(num_layers)
    elif not options.get("target_layer_ids"):
        config.target_layer_ids = default_block_layers(num_layers, config.num_hidden_layers)

    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    target_ids = None
    if (
        draft_vocab := int(options.get("draft_vocab_size") or config.vocab_size)
    ) != config.vocab_size:
        target_ids = target_ids_of(source, d2t, t2d, draft_vocab, config.vocab_size)
    if is_published_by_speculators:  # copies of the target's, which its own classes replace, too
        tensors.pop("embed_tokens.weight", None)
        if target_ids is None:
            tensors.pop("lm_head.weight", None)
    embeddings, lm_head = shared_modules(
        source, config.hidden_size, tensors, target_ids is not None, target
    )
    head = filled(
        checkpoint,
        target,
        lambda: kind(config, embeddings, lm_head),
        tensors,
        UnsupportedModelError,
    )
    check_layers(source, head.feature_layers, num_layers)
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


def _plain_name(name: str) -> str:
    name = MARKOV.sub(
        r"markov_head.\1.", name.removeprefix("logit_head.")
    )  # the prefix of early heads of SpecForge
    return CODEBOOK.sub(r"\1", GRU.sub(r"\1", name))


def _sequential_settings(
    source: str, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the settings of a block head's Markov and confidence heads, known by their tensors.

    Raises:
        UnsupportedModelError: the config has other settings.
    """
    embeds, proj = (
        tensors.get("markov_head.markov_w1.weight"),
        tensors.get("confidence_head.proj.weight"),
    )
    rank = 0 if embeds is None else embeds.shape[1]
    kinds = (kind for part, kind in MARKOV_KINDS.items() if f"markov_head.{part}.weight" in tensors)
    found: dict[str, Any] = {
        "markov_rank": rank,
        "markov_head_type": next(kinds, "vanilla"),
        "enable_confidence_head": proj is not None,
        "confidence_head_with_markov": proj is not None and "norm.weight" in tensors
        and proj.shape[1] != len(tensors["norm.weight"]),
    }  # fmt: skip
    options = {**fields, **(fields.get("dflash_config") or {})}
    applies = {"markov_head_type": rank > 0, "confidence_head_with_markov": proj is not None}
    for name, value in found.items():
        if applies.get(name, True) and options.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"{source} has {name} {options[name]!r} in its config, and tensors of {name} {value!r}"
            )
    return found
