"""Published drafting heads that cannot be loaded, which are recognised so that the error can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_slospec.drafters.heads.checkpoint import Checkpoint
from hf_slospec.errors import UnsupportedModelError

CAUSAL_LMS = {
    name
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
}
LOADED = (
    "EAGLE-3 and P-EAGLE with Llama or Qwen3 layers, DFlash, DFlash2, DSpark, Domino, DeepSpec's heads with Gemma 4 "
    "layers, and MTP layers of Qwen3-Next, MiMo and speculators"
)


class Format(NamedTuple):
    """A published format of heads that cannot be loaded."""

    name: str  # with its publisher
    lacking: str  # what is not implemented here
    recognises: Callable[[Checkpoint], bool]


def refuse_unsupported_head(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError for a head of a known format that cannot be loaded."""
    for kind in FORMATS:
        if kind.recognises(checkpoint):
            raise UnsupportedModelError(
                f"{checkpoint.source} is {kind.name}, which cannot be loaded, as {kind.lacking} not implemented; "
                f"these heads can: {LOADED}"
            )


def check_is_causal_lm(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError unless class and tensor names can be those of a causal LM."""
    source, names = checkpoint.source, checkpoint.architectures
    if (kind := checkpoint.config.get("speculators_model_type")) is not None:
        raise UnsupportedModelError(f"{source} is a head of type {kind!r} of speculators, which cannot be loaded")
    if "fc.weight" in checkpoint.files:
        raise UnsupportedModelError(
            f"{source} is an EAGLE-1, EAGLE-2 or HASS head, which cannot be loaded: it has fc.weight, and is no "
            f"EAGLE-3; these heads can: {LOADED}"
        )
    if names and not any(name.endswith("ForCausalLM") or name in CAUSAL_LMS for name in names):
        raise UnsupportedModelError(
            f"{source} is neither a known head nor a causal LM: its class is {', '.join(names)}; these heads can be "
            f"loaded: {LOADED}"
        )


def _named(*parts: str) -> Callable[[Checkpoint], bool]:
    return lambda checkpoint: checkpoint.is_named(*parts)


def _has(*tensors: str) -> Callable[[Checkpoint], bool]:
    return lambda checkpoint: any(name.startswith(tensors) for name in checkpoint.files)


def _either(*recognise: Callable[[Checkpoint], bool]) -> Callable[[Checkpoint], bool]:
    return lambda checkpoint: any(recognises(checkpoint) for recognises in recognise)


FORMATS = (
    Format(
        "a Medusa head (FasterDecoding)",
        "its residual blocks, one for each position, are",
        _either(_has("medusa_head."), _named("medusa")),
    ),
    Format("a Hydra head", "its MLPs over the tokens drafted before are", _named("hydra")),
    Format("an MLP speculator of IBM", "its MLPs over the last hidden state are", _named("mlpspeculator")),
    Format("a MuseGlimmer assistant of transformers", "its network is", _named("museglimmerassistant")),
)
