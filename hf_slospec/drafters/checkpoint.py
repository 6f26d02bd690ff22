"""Checkpoint files of a published drafter: config and tensors by name; opening reads no tensor."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from hf_slospec.errors import InvalidInputError, UnsupportedModelError
from hf_slospec.model.loading import hub_options

# Raised for missing models, an unreachable Hub, unknown classes and files with invalid content.
LOADING_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip
# File patterns of pickled weights, which are never loaded
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder with config.json and safetensors files."""

    source: str  # folder or repository, for error messages
    config: dict[str, Any]
    files: dict[str, Path]  # tensor name -> file that holds it

    def read(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with ``prefix``, by the names without the prefix."""
        tensors: dict[str, torch.Tensor] = {}
        for path in dict.fromkeys(self.files.values()):
            with safe_open(path, framework="pt") as file:
                names = [
                    name
                    for name, file_of in self.files.items()
                    if file_of == path and name.startswith(prefix)
                ]
                tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        return tensors

    @property
    def architectures(self) -> list[str]:
        """Class names that the config lists as ``architectures``."""
        names: Any = self.config.get("architectures")
        return [str(name) for name in names] if isinstance(names, (list, tuple)) else []

    def is_named(self, *parts: str) -> bool:
        """Return whether a class name in the config contains one of ``parts``, which are in lower
        case.
        """
        return any(part in name.lower() for name in self.architectures for part in parts)


def open_checkpoint(source: str) -> Checkpoint:
    """Return the checkpoint in the folder ``source`` or, if there is no such folder, in the Hub
    repository of this name; read no tensor.
    """
    folder = Path(source)
    if not os.path.isdir(source):
        options = hub_options(source)
        try:
            folder = Path(
                snapshot_download(source, allow_patterns=["*.json", "*.safetensors"], **options)
            )
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{source!r} is neither a folder nor a repository that can be read: {error}"
            ) from error
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        why = f"{', '.join(pickled)} may run code when it is read" if pickled else "there are none"
        raise UnsupportedModelError(
            f"{source} must hold safetensors files: {why}; save its tensors as model.safetensors"
        )
    if not (folder / "config.json").exists():
        raise UnsupportedModelError(
            f"{source} has no config.json; give the folder in which the whole model was saved"
        )
    files: dict[str, Path] = {}
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UnsupportedModelError(f"{source} has a file that cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{source}: config.json must hold an object")
    return Checkpoint(source, config, files)
