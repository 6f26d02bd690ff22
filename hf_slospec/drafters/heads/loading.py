"""Loading of published drafting heads, recognised by config and tensor names and checked against the target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_layers import MtpModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_slospec.drafters.heads.checkpoint import Checkpoint, open_checkpoint
from hf_slospec.drafters.heads.dflash import DFlashHead, default_block_layers
from hf_slospec.drafters.heads.dflash2 import DFlash2Head
from hf_slospec.drafters.heads.dspark import MARKOV_KINDS, DSparkHead
from hf_slospec.drafters.heads.eagle3 import SLIDING, Eagle3Head, Eagle3Settings, PEagleHead, default_feature_layers
from hf_slospec.drafters.heads.head import DraftHead, own_modules
from hf_slospec.drafters.heads.mtp import MtpHead, ShippedMtpHead
from hf_slospec.drafters.heads.unsupported import refuse_unsupported_head
from hf_slospec.errors import IncompatibleDraftError, InvalidInputError, SLOSpecError, UnsupportedModelError
from hf_slospec.models.inspection.checkpoints import listed, not_finite
from hf_slospec.models.inspection.properties import input_device, vocab_size

logger = logging.getLogger(__name__)

MTP_PREFIX = "mtp."
# Tensors that are not read: copies of the target's modules, and computed buffers.
IGNORED = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
)
# Settings of block heads that speculators writes beside those of the layers.
BLOCK_SETTINGS = (
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size", "sample_from_anchor",
    "sliding_window_non_causal", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "output_multiplier", "final_logit_softcapping",
)  # fmt: skip
DEFAULT_PROPOSALS = 8  # positions that P-EAGLE heads are trained to predict, if their config does not tell
DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    "sliding_window_non_causal": True,
}  # fmt: skip
MARKOV = re.compile(r"^(markov_w[12]|gate_proj|joint_proj)\.")  # ModelOpt's names, without the module's
CODEBOOK = re.compile(r"^(candidate_selector\.\w+_codebook)\.weight$")  # z-lab's names, of embeddings
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
    return checkpoint.config.get("speculators_model_type") in ("eagle3", "peagle")


def _load_speculators_eagle3(checkpoint: Checkpoint, target: PreTrainedModel) -> DraftHead:
    config = checkpoint.config
    _check_verifier(checkpoint, target)
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    return _load_eagle3(checkpoint, target, _fields_of_layers(checkpoint.source, config), config, layer_ids)


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    names = {name.removeprefix("model.") for name in checkpoint.files}
    is_one = checkpoint.is_named("eagle3") or not names.isdisjoint(("midlayer.hidden_norm.weight", "mask_hidden"))
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


def _is_block(checkpoint: Checkpoint) -> bool:
    kind = checkpoint.config.get("speculators_model_type")
    if kind is not None:
        return kind in ("dflash", "dflash2", "dspark")
    is_named = checkpoint.is_named("dflash", "dspark") or "dflash_config" in checkpoint.config
    return is_named or any("markov_w1." in name or "candidate_selector." in name for name in checkpoint.files)


def _load_block(checkpoint: Checkpoint, target: PreTrainedModel) -> DFlashHead:
    source, fields = checkpoint.source, checkpoint.config
    is_published_by_speculators = "speculators_model_type" in fields
    tensors = {MARKOV.sub(r"markov_head.\1.", name): tensor for name, tensor in _tensors(checkpoint).items()}
    tensors = {CODEBOOK.sub(r"\1", name): tensor for name, tensor in tensors.items()}
    if is_published_by_speculators:
        _check_verifier(checkpoint, target)
        settings = {name: fields[name] for name in BLOCK_SETTINGS if name in fields}
        fields = _fields_of_layers(source, fields) | settings
    projector = str((fields.get("dflash_config") or {}).get("projector_type") or "dflash").lower()
    if projector not in ("dflash", "dspark"):
        raise UnsupportedModelError(f"{source} has a projector of type {projector!r}; dflash and dspark can be loaded")
    sequential = _sequential_settings(source, fields, tensors)
    is_sequential = bool(sequential["markov_rank"] or sequential["enable_confidence_head"])
    is_dspark = is_sequential or projector == "dspark" or checkpoint.is_named("dspark")
    # Publishers of DSpark but speculators leave the setting out, and predict from the root on.
    fields = {"sample_from_anchor": is_dspark and not is_published_by_speculators} | fields | sequential
    kind: type[DFlashHead] = DSparkHead if is_sequential else DFlashHead
    if any(name.startswith("candidate_selector.") for name in tensors):
        kind, options = DFlash2Head, {**fields, **(fields.get("dflash_config") or {})}
        fields |= {name: options.get(name, default) for name, default in DFLASH2_DEFAULTS.items()}
    unread = {name: value for name, value in fields.items() if name not in ("model_type", "architectures", "auto_map")}
    config = _read_config(source, Qwen3Config, unread | {"target_hidden_size": _hidden_size(target)})
    _check_vocabulary(source, config.vocab_size, target)
    num_layers, options = _num_layers(target), unread | (unread.get("dflash_config") or {})
    if is_published_by_speculators and not options.get("aux_hidden_state_layer_ids"):
        config.aux_hidden_state_layer_ids = default_feature_layers(num_layers)
    elif not options.get("target_layer_ids"):
        config.target_layer_ids = default_block_layers(num_layers, config.num_hidden_layers)

    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    target_ids = None
    if (draft_vocab := int(options.get("draft_vocab_size") or config.vocab_size)) != config.vocab_size:
        target_ids = _target_ids(source, d2t, t2d, draft_vocab, config.vocab_size)
    if is_published_by_speculators:  # copies of the target's, which its own classes replace, too
        tensors.pop("embed_tokens.weight", None)
        if target_ids is None:
            tensors.pop("lm_head.weight", None)
    has_embeddings, has_lm_head = (
        "embed_tokens.weight" in tensors,
        "lm_head.weight" in tensors or target_ids is not None,
    )
    if not has_embeddings:
        _check_shared(source, "embeddings", config.hidden_size, target)
    if not has_lm_head:
        _check_shared(source, "lm_head", config.hidden_size, target)

    def build() -> DFlashHead:
        embeddings = None if has_embeddings else target.get_input_embeddings()
        return kind(config, embeddings, None if has_lm_head else target.get_output_embeddings())

    head = _filled(checkpoint, target, build, tensors, UnsupportedModelError)
    _check_layers(source, head.feature_layers, num_layers)
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


def _sequential_settings(source: str, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the settings of a block head's Markov and confidence heads, known by their tensors.

    Raises:
        UnsupportedModelError: the config has other settings.
    """
    embeds, proj = tensors.get("markov_head.markov_w1.weight"), tensors.get("confidence_head.proj.weight")
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


def _fields_of_layers(source: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers' config of speculators, which is saved without the defaults of its class."""
    nested: Any = fields.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise UnsupportedModelError(f"{source} has no transformer_layer_config in its config")
    kind = nested.get("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"{source} has layers of type {kind!r}, which transformers does not know")
    own: dict[str, Any] = _read_config(source, CONFIG_MAPPING[kind], nested).to_dict()
    return own


def _check_verifier(checkpoint: Checkpoint, target: PreTrainedModel) -> None:
    """Log a warning if a head of speculators names another class of target; tensors show other shapes."""
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    names = [str(name) for name in verifier.get("architectures") or ()]
    families = {name.split("For")[0] for name in (type(target).__name__, *(target.config.architectures or ()))}
    if names and not any(name.split("For")[0] in families for name in names):
        logger.warning(
            "%s was trained with %s, a %s; this target is a %s: it may accept few of its proposals",
            checkpoint.source, verifier.get("name_or_path"), ", ".join(names), type(target).__name__,
        )  # fmt: skip


LAYOUTS = (
    Layout("EAGLE-3 and P-EAGLE in the layout of speculators", _is_speculators_eagle3, _load_speculators_eagle3),
    Layout("EAGLE-3 (LlamaForCausalLMEagle3)", _is_eagle3, _load_published_eagle3),
    Layout("DFlash, DFlash2 and DSpark", _is_block, _load_block),
    Layout("an MTP layer (mtp.*)", _is_mtp, _load_mtp),
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
    source, num_layers = checkpoint.source, _num_layers(target)
    config = _config_of_layers(source, layers)
    _check_vocabulary(source, config.vocab_size, target)
    read = default_feature_layers(num_layers) if feature_layers is None else tuple(feature_layers)
    _check_layers(source, read, num_layers)

    tensors = _with_midlayer(_tensors(checkpoint))
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_vocab = int(options.get("draft_vocab_size") or config.vocab_size)
    target_ids = _target_ids(source, d2t, t2d, draft_vocab, config.vocab_size)
    settings = Eagle3Settings(
        read,
        _hidden_size(target),
        draft_vocab,
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        norm_before_fc=bool(options.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(options.get("fc_norm")) or "fc_norm.0.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    # A reduced vocabulary needs an output layer of its own.
    has_embeddings, has_lm_head = (
        "embed_tokens.weight" in tensors,
        "lm_head.weight" in tensors or target_ids is not None,
    )
    _check_features(source, settings, tensors)
    if not has_embeddings:
        _check_shared(source, "embeddings", config.hidden_size, target)
    if not has_lm_head:
        _check_shared(source, "lm_head", config.hidden_size, target)

    masks = _mask_settings(source, options, config.vocab_size) if "mask_hidden" in tensors else None
    if masks is not None:
        tensors["mask_entry.hidden"] = tensors.pop("mask_hidden")

    def build() -> Eagle3Head:
        embeddings = nn.Embedding(config.vocab_size, config.hidden_size) if has_embeddings else None
        lm_head = None if has_lm_head else target.get_output_embeddings()
        parts = config, settings, embeddings or target.get_input_embeddings(), lm_head
        return Eagle3Head(*parts) if masks is None else PEagleHead(*parts, **masks)

    head = _filled(checkpoint, target, build, tensors, UnsupportedModelError)
    if target_ids is not None:
        head.set_vocabulary(target_ids.to(input_device(target)))
    return head


def _mask_settings(source: str, options: Mapping[str, Any], vocab: int) -> dict[str, int]:
    """Return the settings of a P-EAGLE head: its mask token, and how many positions its publisher lets it predict."""
    token = options.get("mask_token_id", options.get("ptd_token_id"))
    if not isinstance(token, int) or not 0 <= token < vocab:
        raise UnsupportedModelError(
            f"{source} is a P-EAGLE head with mask_token_id {token!r} in its config; it must be one of 0 to {vocab - 1}"
        )
    methods = (options.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return {"mask_token_id": token, "num_proposals": int(methods[0].get("speculative_tokens") or DEFAULT_PROPOSALS)}


def _with_midlayer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an EAGLE-3 head with the first layer named ``midlayer`` and plain names in others."""
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
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModelError(f"{source} has layers of type {kind!r}; only Llama and Qwen3 layers can be loaded")
    config: Any = _read_config(source, Qwen3Config if kind == "qwen3" else LlamaConfig, fields)
    # A window counts in layers that the config names only, as for the publishers' classes.
    if SLIDING not in (getattr(config, "layer_types", None) or ()):
        config.sliding_window = None
    elif getattr(config, "sliding_window", None) is None:
        raise UnsupportedModelError(f"{source} has layers with a sliding window, and no sliding_window in its config")
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise UnsupportedModelError(f"{source} has rotary embeddings of unknown type {rope['rope_type']!r}")
    return config


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


def _check_shared(source: str, what: str, size: int, target: PreTrainedModel) -> None:
    if size != _hidden_size(target):
        raise IncompatibleDraftError(
            f"{source} has a hidden size of {size} and no {what} of its own; the target's have {_hidden_size(target)}"
        )


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors to load, without the prefix ``model.`` that some publishers give to all but the lm_head."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.read().items()}
    return {name: tensor for name, tensor in tensors.items() if name not in IGNORED}


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
