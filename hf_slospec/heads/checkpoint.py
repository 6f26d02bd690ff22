"""Checks and steps that loading a published head needs: read its config, share the target's
embeddings and lm_head, map its vocabulary, and assign its tensors.

``loading.py`` calls them; ``drafters/checkpoint.py`` opens the files.
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
    """Make a config of class ``kind`` from the fields of a JSON config.

    Raises:
        UnsupportedModelError: the class refuses the fields.
    """
    try:
        return kind.from_dict(dict(fields))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"{source} has an invalid config: {error}") from error


def fields_of_layers(source: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``transformer_layer_config`` of a head made by the speculators library, with the
    defaults of its config class filled in: speculators saves it without them.

    Raises:
        UnsupportedModelError: the config has no valid ``transformer_layer_config``.
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
    """Log a warning if a head made by the speculators library says that it was trained for another
    model family than the target's.

    A target with other shapes is noticed when the tensors are loaded.
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
    """Return the target's embeddings and lm_head for the head to share; None for each that the
    head has itself.

    Args:
        source: name of the checkpoint, for errors.
        size: the head's hidden size.
        tensors: the head's tensors by name.
        is_reduced: the head has a reduced vocabulary, so it cannot share the target's lm_head.
        target: the model that the head drafts for.

    Raises:
        IncompatibleDraftError: the head shares one of them, and its hidden size differs from the
            target's.
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
    """Return the target's id of each token in the head's reduced vocabulary; None if the head has
    the target's vocabulary.

    The tensors ``d2t`` (target id minus draft id, by draft id) and ``t2d`` (whether a target token
    is in the draft vocabulary) are removed from ``tensors``.

    Args:
        source: name of the checkpoint, for errors.
        tensors: the head's tensors by name.
        draft_vocab: number of tokens in the head's vocabulary.
        vocab: number of tokens in the target's vocabulary.

    Returns:
        [draft_vocab] int64, or None.

    Raises:
        UnsupportedModelError: ``d2t`` is missing or has the wrong shape.
        IncompatibleDraftError: ``d2t`` does not map to distinct target ids, or contradicts ``t2d``.
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
    """Make a head and assign its tensors, in the target's dtype and on its device.

    Args:
        checkpoint: the head's checkpoint, for errors.
        target: the model that the head drafts for.
        build: returns the head with random weights; called on the meta device first, so that
            nothing is allocated for tensors that do not fit.
        tensors: the head's tensors by name.
        error: class of the error to raise if names or shapes do not fit.

    Raises:
        SLOSpecError: of class ``error``: tensors are missing, unknown or of the wrong shape.
        UnsupportedModelError: the tensors hold NaN or infinite values.
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
    return int(target.config.get_text_config(decoder=True).num_hidden_layers)


def hidden_size_of(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config(decoder=True).hidden_size)
