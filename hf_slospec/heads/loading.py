"""Loading of published drafting heads and MTP layers.

``FORMATS`` at the end is the table of head formats: each entry recognises a checkpoint and loads
it, or gives the reason why it cannot be loaded. ``layouts.py`` reads the configs and chooses the
networks; ``checkpoint.py`` checks tensors against the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_slospec.drafters.checkpoint import Checkpoint, open_checkpoint
from hf_slospec.drafters.head import Head
from hf_slospec.drafters.registry import HeadFormat, head_formats, head_of
from hf_slospec.errors import IncompatibleDraftError, InvalidInputError, UnsupportedModelError
from hf_slospec.heads.checkpoint import (
    check_verifier,
    filled,
    hidden_size_of,
    num_layers_of,
    shared_modules,
    target_ids_of,
)
from hf_slospec.heads.layouts import Layout, block_layout, eagle3_layout
from hf_slospec.heads.mtp import DraftHead, MtpHead, ShippedMtpHead
from hf_slospec.model.properties import input_device, vocab_size

Recognise = Callable[[Checkpoint], bool]
Renames = Mapping[str, str]  # regular expression -> replacement in tensor names, applied in order

# Tensors that are not loaded: copies of the target's weights, and buffers that modules compute.
IGNORED = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
)
EAGLE3_NAMES = {
    r"^layers\.0\.": "midlayer.",
    # SGLang's name for the input norm of layers after the first
    r"^(layers\.\d+)\.hidden_norm\.": r"\1.input_layernorm.",
    r"^mask_hidden$": "mask_entry.hidden",
}
BLOCK_NAMES = {
    r"^logit_head\.": "",  # prefix in early SpecForge checkpoints
    r"^(markov_w[12]|gate_proj|joint_proj)\.": r"markov_head.\1.",  # ModelOpt
    r"^(prefix_gru\.weight_[ih]h)_l0$": r"\1",  # Domino saves an nn.GRU; here it is an nn.GRUCell
    # z-lab saves an nn.Embedding; here it is a parameter
    r"^(candidate_selector\.\w+_codebook)\.weight$": r"\1",
    r"^(refiner_head|xpress_head)\.": "refiner.",  # XPress: speculators, its publisher
    r"^refiner\.w1\.": "refiner.token_embed.",
    r"^refiner\.w2\.": "refiner.readout.",
    r"^refiner\.mix\.L$": "refiner.mix_l",
    r"^refiner\.mlp\.(gate|up|down)_proj\.": r"refiner.mlp_\1.",
}
MIMO_NAMES = {
    r"^token_layernorm\.": "pre_fc_norm_embedding.",
    r"^hidden_layernorm\.": "pre_fc_norm_hidden.",
    r"^input_proj\.": "fc.",
    r"^final_layernorm\.": "norm.",
    r"^(?!pre_fc_norm_|fc\.|norm\.)": "layers.0.",
}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MtpLayout(NamedTuple):
    """Names that one publisher gives the tensors of the first MTP layer in its checkpoints."""

    prefix: str
    projection: str  # tensor name, behind the prefix, by which the format is recognised
    renames: Renames
    # The projection's input is (hidden state, embedding), not (embedding, hidden state).
    hidden_is_first: bool = False


MTP_LAYOUTS = (
    MtpLayout("mtp.", "fc.weight", {}),  # Qwen3-Next
    MtpLayout("model.mtp_layers.0.", "input_proj.weight", MIMO_NAMES, hidden_is_first=True),
    MtpLayout("mtp_layers.0.", "input_proj.weight", MIMO_NAMES),  # speculators
)


def load_head(path: str, target: PreTrainedModel) -> Any:
    """Load the drafting head in a local folder or Hub repository, in the target's dtype and on its
    device.

    Raises:
        InvalidInputError: there is no such folder or repository.
        UnsupportedModelError: the files are pickled, incomplete or in no known format.
        IncompatibleDraftError: the head was made for another target.
    """
    checkpoint = open_checkpoint(path)
    head = head_of(checkpoint, target)
    if head is None:
        raise UnsupportedModelError(
            f"{path} ({checkpoint.config.get('architectures')}) is no drafting head that can be loaded; these are: "
            f"{head_formats()}"
        )
    return head


def renamed(tensors: Mapping[str, torch.Tensor], renames: Renames) -> dict[str, torch.Tensor]:
    """Return the tensors with ``renames`` applied to their names.

    A tensor keeps its old name if another tensor already has the new name.
    """
    result = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, replacement in renames.items():
            new = re.sub(pattern, replacement, new)
        result[name if new in tensors else new] = tensor
    return result


def _load(
    renames: Renames,
    layout_of: Callable[[Checkpoint, PreTrainedModel, dict[str, torch.Tensor]], Layout],
    checkpoint: Checkpoint,
    target: PreTrainedModel,
) -> Head:
    source = checkpoint.source
    check_verifier(checkpoint, target)
    # Some publishers prefix the names of all tensors except the lm_head with "model.".
    plain = {name.removeprefix("model."): tensor for name, tensor in checkpoint.read().items()}
    tensors = renamed({n: each for n, each in plain.items() if n not in IGNORED}, renames)
    config, build, draft_vocab = layout_of(checkpoint, target, tensors)
    if config.vocab_size != vocab_size(target):
        raise IncompatibleDraftError(
            f"{source} is for a vocabulary of {config.vocab_size} tokens; the target's has {vocab_size(target)}"
        )
    target_ids = target_ids_of(source, tensors, draft_vocab, config.vocab_size)
    is_reduced = target_ids is not None
    shared = shared_modules(source, config.hidden_size, tensors, is_reduced, target)
    head: Head = filled(checkpoint, target, lambda: build(*shared), tensors, UnsupportedModelError)
    num_layers = num_layers_of(target)
    if not all(0 <= layer <= num_layers for layer in head.feature_layers):
        raise IncompatibleDraftError(
            f"{source} reads the hidden states {head.feature_layers} of a target that has 0 to {num_layers}"
        )
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


# ---- MTP layers


def load_mtp(target: PreTrainedModel) -> DraftHead:
    """Load the multi-token prediction (MTP) layer from the target's own checkpoint.

    Raises:
        InvalidInputError: the target was not loaded from a checkpoint, or the checkpoint is not
            found.
        UnsupportedModelError: the checkpoint has no MTP layer, or one that cannot be loaded.
        IncompatibleDraftError: the MTP layer's tensors do not have the shapes that the target
            needs.
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
    if _mtp_layout_of(checkpoint) is None:
        mtp_names = sorted(name for name in checkpoint.files if "mtp" in name or "nextn" in name)
        raise UnsupportedModelError(
            f"{source} has MTP layers in a layout that is not implemented, with tensors such as {mtp_names[0]}; those "
            "of Qwen3-Next (mtp.fc.weight) and MiMo (model.mtp_layers.0.input_proj.weight) can be loaded"
            if mtp_names
            else f"{source} has no MTP layer: there is no tensor named mtp.fc.weight"
        )
    return _load_mtp(checkpoint, target)


def _mtp_layout_of(checkpoint: Checkpoint) -> MtpLayout | None:
    return next((e for e in MTP_LAYOUTS if e.prefix + e.projection in checkpoint.files), None)


def _load_mtp(checkpoint: Checkpoint, target: PreTrainedModel) -> MtpHead:
    size = checkpoint.config.get("hidden_size")
    expected = hidden_size_of(target)
    if size not in (None, expected):
        raise IncompatibleDraftError(
            f"{checkpoint.source} is for a hidden size of {size}; the target's is {expected}"
        )
    layout = _mtp_layout_of(checkpoint)
    assert layout is not None
    tensors = _with_joined_experts(renamed(checkpoint.read(layout.prefix), layout.renames))
    if layout.hidden_is_first:
        projection = tensors["fc.weight"]
        tensors["fc.weight"] = projection.roll(projection.shape[1] // 2, dims=1)
    return filled(checkpoint, target, lambda: MtpHead(target), tensors, IncompatibleDraftError)


def _with_joined_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the weights of all experts of an MLP stacked, as in transformers.

    ``experts.0.gate_proj.weight`` and so on become ``experts.gate_up_proj`` and
    ``experts.down_proj``; other tensors stay as they are.
    """
    joined: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            joined[name] = tensor
    for name, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[part][index] for index in sorted(parts[part])])
            for part in ("gate", "up", "down")
        )
        joined[f"{name}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        joined[f"{name}.down_proj"] = down
    return joined


# ---- head formats


def _speculators(*kinds: str) -> Recognise:
    return lambda checkpoint: checkpoint.config.get("speculators_model_type") in kinds


def _marks(*names: str, tensor: str | None = None, field: str | None = None) -> Recognise:
    """Return a function that recognises a checkpoint if any one of the given marks is present.

    Args:
        names: parts of the name of the checkpoint's model class.
        tensor: regular expression that matches the name of a tensor.
        field: name of a config field.
    """
    return lambda checkpoint: (
        checkpoint.is_named(*names)
        or field in checkpoint.config
        or (tensor is not None and any(re.search(tensor, name) for name in checkpoint.files))
    )


load_eagle3 = partial(_load, EAGLE3_NAMES, eagle3_layout)
load_block = partial(_load, BLOCK_NAMES, block_layout)
FORMATS = (
    HeadFormat(
        "a Medusa head (FasterDecoding)",
        _marks("medusa", tensor=r"^medusa_head\."),
        reason=", as its residual blocks, one for each position, are not implemented",
    ),
    HeadFormat(
        "a Hydra head",
        _marks("hydra"),
        reason=", as its MLPs over the tokens drafted before are not implemented",
    ),
    HeadFormat(
        "an MLP speculator of IBM",
        _marks("mlpspeculator"),
        reason=", as its MLPs over the last hidden state are not implemented",
    ),
    HeadFormat(
        "a MuseGlimmer assistant of transformers",
        _marks("museglimmerassistant"),
        reason=", as its network is not implemented",
    ),
    HeadFormat("EAGLE-3 and P-EAGLE of speculators", _speculators("eagle3", "peagle"), load_eagle3),
    HeadFormat(
        "DFlash, DFlash2, DSpark and XPress of speculators",
        _speculators("dflash", "dflash2", "dspark", "xpress"),
        load_block,
    ),
    HeadFormat(
        "an MTP layer of Qwen3-Next, MiMo or speculators",
        lambda checkpoint: _mtp_layout_of(checkpoint) is not None,
        _load_mtp,
    ),
    HeadFormat(
        "a head of type {speculators_model_type!r} of speculators",
        _marks(field="speculators_model_type"),
    ),
    HeadFormat(
        "EAGLE-3 and P-EAGLE",
        _marks("eagle3", tensor=r"^(model\.)?(midlayer\.hidden_norm\.weight|mask_hidden)$"),
        load_eagle3,
    ),
    HeadFormat(
        "DFlash, DFlash2, DSpark, Domino, XPress and LiLiCorr",
        _marks(
            "dflash",
            "dspark",
            "domino",
            "xpress",
            "lilicorr",
            field="dflash_config",
            tensor=r"markov_w1\.|candidate_selector\.|xpress_head\.|^(model\.)?lilicorr\.",
        ),
        load_block,
    ),
    HeadFormat(
        "an EAGLE-1, EAGLE-2 or HASS head",
        _marks(tensor=r"^fc\.weight$"),
        reason=": it has fc.weight, and is no EAGLE-3",
    ),
)
