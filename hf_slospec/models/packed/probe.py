"""Probe of a model: refuses what packed forwards cannot run, and finds what the layers cache."""

from __future__ import annotations

from typing import Any

import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.attention import AttentionLayer, DecoderForward
from hf_slospec.models.inspection.hooks import is_compiled
from hf_slospec.models.inspection.properties import (
    attends_to_encoder,
    evaluating,
    input_device,
    layer_types,
    refused_if_it_fails,
)
from hf_slospec.models.packed.gathered_probe import GatheredProbe
from hf_slospec.models.packed.interface_probe import NO_MIXING, InterfaceProbe
from hf_slospec.models.packed.running import run_model
from hf_slospec.models.recurrent.stock_cache import StateLayer

# Types of layers that attend through the interface or keep a state; the probe finds which of them can be packed.
INTERFACE_KINDS = NO_MIXING | {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "mamba2",
    "hybrid",
    "hybrid_sliding",
}
GATHERED_KINDS = {"indexed_attention"}  # types of layers whose own attention is right over gathered keys


def refuse_by_declaration(model: Any) -> None:
    """Raise UnsupportedModelError if the model's config or class rules out packed forwards."""
    name = type(model).__name__
    if is_compiled(model):
        raise UnsupportedModelError(
            f"{name} was compiled with compile() or torch.compile, as a whole, in part, or its forward, and tree "
            "attention cannot be used in compiled layers; pass the model as it was loaded"
        )
    if any(map(_is_activated_lora, model.modules())):
        raise UnsupportedModelError(
            f"{name} has an active aLoRA adapter, which changes layers from its invocation tokens on only; use plain "
            "LoRA, disable the adapter, or call generate without slo_tpot"
        )
    # is_decoder=False turns models of some families into encoders; other families ignore it.
    is_whole = getattr(model.config, "is_encoder_decoder", False)
    is_encoder = not is_whole and getattr(model.config, "is_decoder", None) is False
    if is_encoder and any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UnsupportedModelError(f"{name} was loaded as an encoder; load it with is_decoder=True in its config")
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} attends to blocks of keys by their place; load it with attention_type='original_full' in its "
            "config"
        )
    if unknown := set(layer_types(model)) - INTERFACE_KINDS - GATHERED_KINDS:
        raise UnsupportedModelError(f"{name} has layers of type {sorted(unknown)}, which cannot hold a tree of tokens")


def _is_activated_lora(module: Any) -> bool:
    """Return whether a layer of PEFT has an adapter in use that begins at its invocation tokens."""
    variants = getattr(module, "lora_variant", None) or {}
    names = [] if not variants or module.disable_adapters else module.active_adapters
    return any(type(variants[name]).__name__.startswith("ALora") for name in names if name in variants)


@torch.no_grad()
def probe_layers(model: Any) -> tuple[list[AttentionLayer], list[StateLayer]]:
    """Return the model's layers that attend and those that keep a state, seen in two forwards of one token.

    One forward has no masks, the other has those of transformers.

    Raises:
        UnsupportedModelError: the forward failed, or its layers can attend neither through the interface nor over
            gathered keys.
    """
    zero = torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    with evaluating(model):
        if set(layer_types(model)) <= INTERFACE_KINDS:
            try:
                return _probed_interface(model, zero)
            except UnsupportedModelError:
                if getattr(model, "_is_stateful", False) or attends_to_encoder(model):
                    raise  # states can be restored, and encoders attended to, through the interface only
        with refused_if_it_fails(model):
            probe = GatheredProbe(zero)
            run_model(model, probe, input_ids=zero, position_ids=zero)
            return probe.layers(model), []


def _probed_interface(model: Any, zero: torch.Tensor) -> tuple[list[AttentionLayer], list[StateLayer]]:
    with refused_if_it_fails(model):
        probe, watch = InterfaceProbe(), InterfaceProbe()
        own, seen = (DecoderForward(each) if attends_to_encoder(model) else each for each in (probe, watch))
        run_model(model, own, input_ids=zero, position_ids=zero)
        run_model(model, seen, input_ids=zero, position_ids=zero, attention_mask=torch.ones_like(zero))
        return probe.layers(model, watch.reaches)
