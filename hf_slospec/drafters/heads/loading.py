"""Loading of published drafting heads, recognised by config and tensor names and checked against the target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_layers import MtpModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_slospec.drafters.heads.checkpoint import Checkpoint, open_checkpoint
from hf_slospec.drafters.heads.dflash import DFlashHead
from hf_slospec.drafters.heads.eagle3 import Eagle3Head, Eagle3Settings, default_feature_layers
from hf_slospec.drafters.heads.head import DraftHead, own_modules
from hf_slospec.drafters.heads.mtp import MtpHead, ShippedMtpHead
from hf_slospec.drafters.heads.unsupported import refuse_unsupported_head
from hf_slospec.errors import IncompatibleDraftError, InvalidInputError, SLOSpecError, UnsupportedModelError
from hf_slospec.models.inspection.checkpoints import listed, not_finite
from hf_slospec.models.inspection.properties import input_device, vocab_size

MTP_PREFIX = "mtp."
# Tensors that are not read: copies of the target's modules, and computed buffers.
IGNORED = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
)
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
Head = TypeVar("Head", bound=DraftHead | DFlashHead)


class Layout(NamedTuple):
    """A published layout of drafting heads that can be loaded."""

    name: str
    recognises: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, PreTrainedModel], DraftHead | DFlashHead]


def load_head(path: str, target: PreTrainedModel) -> DraftHead | DFlashHead:
    """Return the drafting head in a folder or Hub repository, in the target's dtype and on its device.

    Raises:
        InvalidInputError: there is no such folder or repository.
        UnsupportedModelError: the files are pickled, incomplete or in none of the layouts in ``LAYOUTS``.
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
            raise UnsupportedModelError(f"transformers cannot load the MTP layers of {source!r}: {error}") from error
        shipped = ShippedMtpHead(target, mtp.to(input_device(target)))
        shipped.train(False)
        return shipped
    if not source:
        raise InvalidInputError(
            "the target was not loaded from a folder or repository, where its MTP layer would be; load it from one"
        )
    checkpoint = open_checkpoint(source)
    if not _is_mtp(checkpoint):
        raise UnsupportedModelError(f"{source} has no MTP layer: there is no tensor named {MTP_PREFIX}fc.weight")
    return _load_mtp(checkpoint, target)


def _is_speculators_eagle3(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("speculators_model_type") == "eagle3"


def _load_speculators_eagle3(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    config = checkpoint.config
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    return _load_eagle3(checkpoint, target, config["transformer_layer_config"], config, layer_ids)


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    is_one = checkpoint.is_named("eagle3") or "midlayer.hidden_norm.weight" in checkpoint.files
    return is_one and "speculators_model_type" not in checkpoint.config


def _load_published_eagle3(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    config = checkpoint.config
    options = config | (config.get("eagle_config") or {})
    if options.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            f"{checkpoint.source} reads one hidden state, as EAGLE-2 does; EAGLE-3 reads several"
        )
    # Layers whose outputs are read; output_hidden_states begins with the embeddings.
    outputs_of = options.get("eagle_aux_hidden_state_layer_ids") or options.get("target_layer_ids")
    return _load_eagle3(checkpoint, target, config, options, outputs_of and [layer + 1 for layer in outputs_of])


def _is_mtp(checkpoint: Checkpoint) -> bool:
    return f"{MTP_PREFIX}fc.weight" in checkpoint.files


def _load_mtp(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    size, expected = checkpoint.config.get("hidden_size"), _hidden_size(target)
    if size not in (None, expected):
        raise IncompatibleDraftError(f"{checkpoint.source} is for a hidden size of {size}; the target's is {expected}")
    tensors = _with_joined_experts(checkpoint.read(MTP_PREFIX))
    return _filled(checkpoint, target, lambda: MtpHead(target), tensors, IncompatibleDraftError)


def _is_dflash(checkpoint: Checkpoint) -> bool:
    return checkpoint.is_named("dflash") or "dflash_config" in checkpoint.config


def _load_dflash(checkpoint: Checkpoint, target: PreTrainedModel) -> DFlashHead:
    source, fields = checkpoint.source, checkpoint.config
    _check_vocabulary(source, fields.get("vocab_size"), target)
    unread = {name: value for name, value in fields.items() if name not in ("model_type", "architectures", "auto_map")}
    config = _read_config(source, Qwen3Config, unread | {"target_hidden_size": _hidden_size(target)})
    tensors = {name: tensor for name, tensor in checkpoint.read().items() if name not in IGNORED}
    has_embeddings, has_lm_head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    if not has_embeddings:
        _check_embeddings(source, config.hidden_size, target)

    def build() -> DFlashHead:
        embeddings = None if has_embeddings else target.get_input_embeddings()
        return DFlashHead(config, embeddings, None if has_lm_head else target.get_output_embeddings())

    head = _filled(checkpoint, target, build, tensors, UnsupportedModelError)
    _check_layers(source, head.feature_layers, _num_layers(target))
    return head


LAYOUTS = (
    Layout("EAGLE-3 in the layout of speculators", _is_speculators_eagle3, _load_speculators_eagle3),
    Layout("EAGLE-3 (LlamaForCausalLMEagle3)", _is_eagle3, _load_published_eagle3),
    Layout("DFlash", _is_dflash, _load_dflash),
    Layout("an MTP layer (mtp.*)", _is_mtp, _load_mtp),
)


def _load_eagle3(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    layer: Mapping[str, Any],
    options: Mapping[str, Any],
    feature_layers: list[int] | None,
) -> Eagle3Head:
    """Return an EAGLE-3 head.

    Args:
        checkpoint: the head's.
        target: the model that it drafts for.
        layer: fields of the layer's config.
        options: fields of the head's config.
        feature_layers: numbered as in output_hidden_states; None: the default ones.
    """
    source, num_layers = checkpoint.source, _num_layers(target)
    config = _config_of_layer(source, layer)
    _check_vocabulary(source, config.vocab_size, target)
    layers = default_feature_layers(num_layers) if feature_layers is None else tuple(feature_layers)
    _check_layers(source, layers, num_layers)

    tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in checkpoint.read().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in IGNORED}
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_vocab = int(options.get("draft_vocab_size") or config.vocab_size)
    target_ids = _target_ids(source, d2t, t2d, draft_vocab, config.vocab_size)
    settings = Eagle3Settings(
        layers,
        _hidden_size(target),
        draft_vocab,
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        norm_before_fc=bool(options.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(options.get("fc_norm")) or "fc_norm.0.weight" in tensors,
    )
    has_embeddings = "embed_tokens.weight" in tensors
    _check_features(source, settings, tensors)
    if not has_embeddings:
        _check_embeddings(source, config.hidden_size, target)

    def build() -> Eagle3Head:
        embeddings = nn.Embedding(config.vocab_size, config.hidden_size) if has_embeddings else None
        return Eagle3Head(config, settings, embeddings or target.get_input_embeddings())

    head = _filled(checkpoint, target, build, tensors, UnsupportedModelError)
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


def _config_of_layer(source: str, fields: Mapping[str, Any]) -> LlamaConfig:
    if (kind := fields.get("model_type", "llama")) != "llama":
        raise UnsupportedModelError(f"{source} has a layer of type {kind!r}; only Llama layers can be loaded")
    if (num_layers := fields.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError(f"{source} has {num_layers} layers; only heads of one layer can be loaded")
    _check_window(source, fields)
    config: LlamaConfig = _read_config(source, LlamaConfig, {**fields, "sliding_window": None})
    rope: Any = config.rope_parameters
    if rope["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise UnsupportedModelError(f"{source} has rotary embeddings of unknown type {rope['rope_type']!r}")
    return config


def _check_window(source: str, fields: Mapping[str, Any]) -> None:
    """Refuse a layer with a sliding window, which the kinds of layers tell where the config names them."""
    kinds, window = fields.get("layer_types"), fields.get("sliding_window")
    slides = window is not None and fields.get("use_sliding_window", True)
    if "sliding_attention" in kinds if kinds else slides:
        raise UnsupportedModelError(
            f"{source} has a layer with a sliding window of {window} tokens; only heads that attend to all tokens can "
            "be loaded"
        )


def _read_config(source: str, kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> Any:
    try:
        return kind.from_dict(dict(fields))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"{source} has an invalid config: {error}") from error


def _check_vocabulary(source: str, size: int | None, target: PreTrainedModel) -> None:
    if size != vocab_size(target):
        raise IncompatibleDraftError(
            f"{source} is for a vocabulary of {size} tokens; the target's has {vocab_size(target)}"
        )


def _check_layers(source: str, layers: tuple[int, ...], num_layers: int) -> None:
    if not all(0 <= one <= num_layers for one in layers):
        raise IncompatibleDraftError(
            f"{source} reads the hidden states {layers} of a target that has 0 to {num_layers}"
        )


def _check_embeddings(source: str, size: int, target: PreTrainedModel) -> None:
    if size != _hidden_size(target):
        raise IncompatibleDraftError(
            f"{source} has a hidden size of {size} and no embeddings of its own; the target's have "
            f"{_hidden_size(target)}"
        )


def _check_features(source: str, settings: Eagle3Settings, tensors: Mapping[str, torch.Tensor]) -> None:
    size, num_features = settings.target_hidden_size, len(settings.feature_layers)
    if "fc.weight" in tensors and (width := tensors["fc.weight"].shape[1]) != num_features * size:
        raise IncompatibleDraftError(
            f"{source} reads {width} features; {num_features} hidden states of the target have {num_features * size}"
        )


def _target_ids(
    source: str, d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_vocab: int, vocab: int
) -> torch.Tensor | None:
    """Return the target ids of a draft vocabulary, [draft_vocab] int64; None if the ids are the same."""
    if d2t is None:
        if draft_vocab != vocab:
            raise UnsupportedModelError(f"{source} drafts {draft_vocab} of {vocab} tokens, and has no tensor d2t")
        return None
    if d2t.shape != (draft_vocab,):
        raise UnsupportedModelError(f"d2t of {source} has shape {tuple(d2t.shape)}; it must be ({draft_vocab},)")
    target_ids = torch.arange(draft_vocab) + d2t.long()
    if not bool(((target_ids >= 0) & (target_ids < vocab)).all()) or len(target_ids.unique()) != draft_vocab:
        raise IncompatibleDraftError(f"d2t of {source} does not map to {draft_vocab} different ids of 0 to {vocab - 1}")
    if t2d is not None and (t2d.shape != (vocab,) or not torch.equal(t2d.nonzero()[:, 0], target_ids.sort().values)):
        raise IncompatibleDraftError(f"d2t and t2d of {source} do not name the same tokens")
    return target_ids


def _filled(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    build: Callable[[], Head],
    tensors: Mapping[str, torch.Tensor],
    error: type[SLOSpecError],
) -> Head:
    """Return a head with these tensors; raise ``error`` before it is built if their names or shapes do not fit."""
    with torch.device("meta"):
        expected = own_modules(build(), target).state_dict()
    faults = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (
            ("it lacks", expected.keys() - tensors.keys()),
            ("it has unknown", tensors.keys() - expected.keys()),
        )
        if names
    ]
    faults += [
        f"{name} has shape {tuple(tensors[name].shape)} and not {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    if faults:
        raise error(f"the tensors of {checkpoint.source} do not fit: {'; '.join(faults)}")
    if names := not_finite(tensors.items()):
        raise UnsupportedModelError(f"{checkpoint.source} holds NaN or infinite weights, in {listed(names)}")
    device = input_device(target)
    with torch.device(device):
        head = build()
    state = {name: tensor.to(device, target.dtype) for name, tensor in tensors.items()}
    own_modules(head, target).load_state_dict(state, assign=True)
    head.train(False)
    return head


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
        gate, up, down = ([parts[part][index] for index in sorted(parts[part])] for part in ("gate", "up", "down"))
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        joined[f"{name}.gate_up_proj"], joined[f"{name}.down_proj"] = torch.stack(pairs), torch.stack(down)
    return joined


def _num_layers(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def _hidden_size(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config(decoder=True).hidden_size)
