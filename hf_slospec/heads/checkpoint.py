"""Fitting of a published head to its target: the config, the vocabulary, the shared modules and the
tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_slospec.drafters.checkpoint import Checkpoint
from hf_slospec.drafters.head import Head
from hf_slospec.errors import IncompatibleDraftError, SLOSpecError, UnsupportedModelError
from hf_slospec.heads.mtp import own_modules
from hf_slospec.model.loading import listed, not_finite
from hf_slospec.model.properties import input_device

logger = logging.getLogger(__name__)
Built = TypeVar("Built", bound=Head)


def read_config(source: str, kind: type[PreTrainedConfig], fields: Mapping[str, Any]) -> Any:
    """Return a config of this class; raise UnsupportedModelError if it refuses the fields."""
    try:
        return kind.from_dict(dict(fields))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"{source} has an invalid config: {error}") from error


def fields_of_layers(source: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers' config of speculators, which is saved without the defaults
    of its class.
    """
    nested: Any = fields.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise UnsupportedModelError(f"{source} has no transformer_layer_config in its config")
    kind = nested.get("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{source} has layers of type {kind!r}, which transformers does not know"
        )
    return dict(read_config(source, CONFIG_MAPPING[kind], nested).to_dict())


def check_verifier(checkpoint: Checkpoint, target: PreTrainedModel) -> None:
    """Log a warning if a head of speculators names another class of target; tensors show other
    shapes.
    """
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    names = [str(name) for name in verifier.get("architectures") or ()]
    families = {
        name.split("For")[0]
        for name in (type(target).__name__, *(target.config.architectures or ()))
    }
    if names and not any(name.split("For")[0] in families for name in names):
        logger.warning(
            "%s was trained with %s, a %s; this target is a %s: it may accept few of its proposals",
            checkpoint.source, verifier.get("name_or_path"), ", ".join(names), type(target).__name__,
        )  # fmt: skip


def shared_modules(
    source: str,
    size: int,
    tensors: Mapping[str, torch.Tensor],
    is_reduced: bool,
    target: PreTrainedModel,
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the target's embeddings and output layer, None for those that the head has itself.

    Args:
        source: name in errors.
        size: the head's hidden size.
        tensors: the head's.
        is_reduced: the head has a reduced vocabulary, which needs an output layer of its own.
        target: the model that the head drafts for.

    Raises:
        IncompatibleDraftError: the head needs the target's, and they have another size.
    """
    shared = {
        what: None if is_own else module
        for what, is_own, module in (
            ("embeddings", "embed_tokens.weight" in tensors, target.get_input_embeddings()),
            ("lm_head", "lm_head.weight" in tensors or is_reduced, target.get_output_embeddings()),
        )
    }
    for what, module in shared.items():
        if module is not None and size != hidden_size_of(target):
            raise IncompatibleDraftError(
                f"{source} has a hidden size of {size} and no {what} of its own; the target's have "
                f"{hidden_size_of(target)}"
            )
    return shared["embeddings"], shared["lm_head"]


def target_ids_of(
    source: str, tensors: dict[str, torch.Tensor], draft_vocab: int, vocab: int
) -> torch.Tensor | None:
    """Remove d2t and t2d; return the target ids of a draft vocabulary, [draft_vocab] int64, or None
    if the ids are the same.
    """
    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    if d2t is None:
        if draft_vocab != vocab:
            raise UnsupportedModelError(
                f"{source} drafts {draft_vocab} of {vocab} tokens, and has no tensor d2t"
            )
        return None
    if d2t.shape != (draft_vocab,):
        raise UnsupportedModelError(
            f"d2t of {source} has shape {tuple(d2t.shape)}; it must be ({draft_vocab},)"
        )
    target_ids = torch.arange(draft_vocab) + d2t.long()
    if (
        not bool(((target_ids >= 0) & (target_ids < vocab)).all())
        or len(target_ids.unique()) != draft_vocab
    ):
        raise IncompatibleDraftError(
            f"d2t of {source} does not map to {draft_vocab} different ids of 0 to {vocab - 1}"
        )
    if t2d is not None and (
        t2d.shape != (vocab,) or not torch.equal(t2d.nonzero()[:, 0], target_ids.sort().values)
    ):
        raise IncompatibleDraftError(f"d2t and t2d of {source} do not name the same tokens")
    return target_ids


def filled(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    build: Callable[[], Built],
    tensors: Mapping[str, torch.Tensor],
    error: type[SLOSpecError],
) -> Built:
    """Return a head with these tensors; raise ``error`` before it is built if their names or shapes
    do not fit.
    """
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
        raise UnsupportedModelError(
            f"{checkpoint.source} holds NaN or infinite weights, in {listed(names)}"
        )
    device = input_device(target)
    with torch.device(device):
        head = build()
    state = {name: tensor.to(device, target.dtype) for name, tensor in tensors.items()}
    own_modules(head, target).load_state_dict(state, assign=True)
    head.train(False)
    return head


def num_layers_of(target: PreTrainedModel) -> int:
    """Return the number of the target's layers."""
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def hidden_size_of(target: PreTrainedModel) -> int:
    """Return the size of the target's hidden states."""
    return int(target.config.get_text_config(decoder=True).hidden_size)
