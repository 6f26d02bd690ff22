"""Loading of checkpoints, which are refused if tensors are missing, left over or not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedConfig, PreTrainedModel

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.forks import Lock

MAX_NAMES = 4  # names of tensors in an error
_patching = Lock()


def load_model(auto: Any, source: str, allow_missing: bool = False, **options: Any) -> PreTrainedModel:
    """Load a model by ``auto.from_pretrained``, and check that it is complete; no weight requires a gradient.

    Args:
        auto: a model class or auto class of transformers.
        source: a folder or a Hub repository.
        allow_missing: accept tensors that the files lack, which stay random, and those that the model leaves out.
        options: those of ``from_pretrained``.

    Raises:
        UnsupportedModelError: tensors are missing or left over, other than tied ones and those that the class declares
            ignorable, or weights are not finite; the message names them.
    """
    with assistants_can_be_built():
        model, info = auto.from_pretrained(source, output_loading_info=True, **options)
    if not allow_missing:
        refuse_unfinished(
            source,
            type(model).__name__,
            [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])],
            info["unexpected_keys"],
        )
    if names := not_finite(model.named_parameters()):
        raise UnsupportedModelError(f"{source} holds NaN or infinite weights, in {listed(names)}; load another copy")
    loaded: PreTrainedModel = model.requires_grad_(False)
    return loaded


def refuse_unfinished(source: str, kind: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise UnsupportedModelError if tensors of a checkpoint are missing or left over."""
    parts = (("it lacks", "which would be random", missing), ("it has", "which this class leaves out", unexpected))
    faults = [f"{what} {listed(names)}, {why}" for what, why, names in parts if names]
    if faults:
        raise UnsupportedModelError(
            f"{source} is not a whole {kind}: {'; '.join(faults)}; load a whole checkpoint of this class, or insist "
            "with allow_missing=True (--allow-missing)"
        )


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinite values; 8-bit ones are not checked."""
    return [name for name, tensor in named if not _is_finite(tensor.detach())]


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.is_floating_point() or local.dtype.itemsize < 2 or local.device.type == "meta":
        return True
    return bool(local.sum(dtype=torch.float32).isfinite() or local.isfinite().all())  # a sum needs no second tensor


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - MAX_NAMES
    return ", ".join(ordered[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def assistants_can_be_built() -> Iterator[None]:
    """Let transformers 5.23 build Gemma 4 assistants inside this context.

    It refuses a config whose layers all take K/V from elsewhere, as those of assistants take them from the target.
    """
    with _patching, contextlib.ExitStack() as patches:
        for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            patches.enter_context(mock.patch.object(config, "kv_sharing_modes", _sharing_modes(config)))
        yield


def _sharing_modes(kind: type[PreTrainedConfig]) -> property:
    stock: Any = kind.__dict__["kv_sharing_modes"]

    def modes(config: Any) -> Any:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return stock.fget(config)

    return property(modes)
