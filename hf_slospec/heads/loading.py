"""Loading of published drafting heads, recognised by config and tensor names and checked against
the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_slospec.errors import IncompatibleDraftError, InvalidInputError, UnsupportedModelError
from hf_slospec.heads.checkpoint import Checkpoint, filled, hidden_size_of, open_checkpoint
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.heads.loading_blocks import is_block, load_block
from hf_slospec.heads.loading_eagle3 import (
    is_eagle3,
    is_speculators_eagle3,
    load_published_eagle3,
    load_speculators_eagle3,
)
from hf_slospec.heads.mtp import DraftHead, MtpHead, ShippedMtpHead
from hf_slospec.model.properties import input_device

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
    source = checkpoint.source
    names = checkpoint.architectures
    if (kind := checkpoint.config.get("speculators_model_type")) is not None:
        raise UnsupportedModelError(
            f"{source} is a head of type {kind!r} of speculators, which cannot be loaded"
        )
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
    Format(
        "an MLP speculator of IBM",
        "its MLPs over the last hidden state are",
        _named("mlpspeculator"),
    ),
    Format(
        "a MuseGlimmer assistant of transformers", "its network is", _named("museglimmerassistant")
    ),
)


# Prefixes of the first MTP layer's tensors: of Qwen3-Next, whose names MtpHead has, of MiMo and of
# speculators.
MTP_PREFIX = "mtp."
MIMO_PREFIX = "model.mtp_layers.0."
SPECULATORS_PREFIX = "mtp_layers.0."
MIMO_NAMES = {
    "token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden", "input_proj": "fc",
    "final_layernorm": "norm",
}  # fmt: skip
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Layout(NamedTuple):
    """A published layout of drafting heads that can be loaded."""

    name: str
    recognises: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, PreTrainedModel], DraftHead | DFlashHead]


def load_head(path: str, target: PreTrainedModel) -> DraftHead | DFlashHead:
    """Return the drafting head in a folder or Hub repository, in the target's dtype and on its
    device.

    Raises:
        InvalidInputError: there is no such folder or repository.
        UnsupportedModelError: the files are pickled, incomplete or in none of the layouts in
            ``LAYOUTS``.
        IncompatibleDraftError: the head was made for another target.
    """
    checkpoint = open_checkpoint(path)
    if (layout := layout_of(checkpoint)) is not None:
        return layout.load(checkpoint, target)
    kind = checkpoint.config.get("speculators_model_type") or checkpoint.config.get("architectures")
    raise UnsupportedModelError(
        f"{path} ({kind}) is no drafting head that can be loaded; these are: {', '.join(one.name for one in LAYOUTS)}"
    )


def layout_of(checkpoint: Checkpoint) -> Layout | None:
    """Return the layout of a head's checkpoint; None if it has none of ``LAYOUTS``.

    Raises:
        UnsupportedModelError: it has a known layout that cannot be loaded.
    """
    refuse_unsupported_head(checkpoint)
    return next((layout for layout in LAYOUTS if layout.recognises(checkpoint)), None)


def load_mtp(target: PreTrainedModel) -> DraftHead:
    """Return the multi-token prediction layer that was published with the target.

    Raises:
        InvalidInputError: the target's own checkpoint is not found.
        UnsupportedModelError: the checkpoint has no MTP layer, or one that cannot be loaded.
        IncompatibleDraftError: the MTP layer does not have the target's shape.
    """
    source = str(target.config.name_or_path)
    if getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        try:
            mtp: Any = MtpModel.from_pretrained(target)
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(
                f"transformers cannot load the MTP layers of {source!r}: {error}"
            ) from error
        shipped = ShippedMtpHead(target, mtp.to(input_device(target)))
        shipped.train(False)
        return shipped
    if not source:
        raise InvalidInputError(
            "the target was not loaded from a folder or repository, where its MTP layer would be; load it from one"
        )
    checkpoint = open_checkpoint(source)
    if not _is_mtp(checkpoint):
        others = sorted(name for name in checkpoint.files if "mtp" in name or "nextn" in name)
        raise UnsupportedModelError(
            f"{source} has MTP layers in a layout that is not implemented, with tensors such as {others[0]}; those of "
            f"Qwen3-Next ({MTP_PREFIX}fc.weight) and MiMo ({MIMO_PREFIX}input_proj.weight) can be loaded"
            if others
            else f"{source} has no MTP layer: there is no tensor named {MTP_PREFIX}fc.weight"
        )
    return _load_mtp(checkpoint, target)


def _is_mtp(checkpoint: Checkpoint) -> bool:
    ends = {
        MTP_PREFIX: "fc.weight",
        MIMO_PREFIX: "input_proj.weight",
        SPECULATORS_PREFIX: "input_proj.weight",
    }
    return any(prefix + end in checkpoint.files for prefix, end in ends.items())


def _load_mtp(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    size = checkpoint.config.get("hidden_size")
    expected = hidden_size_of(target)
    if size not in (None, expected):
        raise IncompatibleDraftError(
            f"{checkpoint.source} is for a hidden size of {size}; the target's is {expected}"
        )
    tensors = _with_joined_experts(checkpoint.read(MTP_PREFIX) or _renamed(checkpoint))
    return filled(checkpoint, target, lambda: MtpHead(target), tensors, IncompatibleDraftError)


def _renamed(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of an MTP layer of MiMo or speculators under Qwen3-Next's names."""
    of_mimo = checkpoint.read(MIMO_PREFIX)
    tensors = {}
    for name, tensor in (of_mimo or checkpoint.read(SPECULATORS_PREFIX)).items():
        part, _, rest = name.partition(".")
        tensors[f"{MIMO_NAMES[part]}.{rest}" if part in MIMO_NAMES else f"layers.0.{name}"] = tensor
    if of_mimo:  # its hidden state comes before the embedding
        tensors["fc.weight"] = tensors["fc.weight"].roll(tensors["fc.weight"].shape[1] // 2, dims=1)
    return tensors


LAYOUTS = (
    Layout(
        "EAGLE-3 and P-EAGLE in the layout of speculators",
        is_speculators_eagle3,
        load_speculators_eagle3,
    ),
    Layout("EAGLE-3 (LlamaForCausalLMEagle3)", is_eagle3, load_published_eagle3),
    Layout("DFlash, DFlash2, DSpark and Domino", is_block, load_block),
    Layout(
        "an MTP layer of Qwen3-Next (mtp.*), MiMo or speculators (mtp_layers.*)", _is_mtp, _load_mtp
    ),
)


def _with_joined_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the weights of all experts stacked, as in transformers' modules."""
    joined: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            joined[name] = tensor
    for name, parts in experts.items():
        gate, up, down = (
            [parts[part][index] for index in sorted(parts[part])] for part in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        joined[f"{name}.gate_up_proj"], joined[f"{name}.down_proj"] = (
            torch.stack(pairs),
            torch.stack(down),
        )
    return joined
